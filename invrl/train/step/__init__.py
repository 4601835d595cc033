"""One training step, from a rank's shard of a batch to new weights.

Start with `train_step.py`.
"""
