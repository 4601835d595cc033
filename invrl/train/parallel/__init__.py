"""The trainer's ranks among each other: the weights and tokens that they divide, and
what they exchange. (How many ranks divide what is in `parallel_layout.py`.)

Data parallelism and the schedule of micro-batches are Megatron's; `model/optimizer.py`
and `step/train_step.py` set them up.
"""
