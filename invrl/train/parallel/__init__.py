"""How the trainer's ranks divide a model and its data: the layout, and which weights
they divide.

Data parallelism and the schedule of micro-batches are Megatron's; `optimizer.py` and
`step.py` set them up.
"""
