"""Relations among the trainer's ranks: the weights and tokens that they divide, and
what they exchange. (The numbers of ranks are in `parallel_layout.py`.)

Data parallelism and the schedule of micro-batches are Megatron's; `model/optimizer.py`
and `step/train_step.py` set them up.
"""
