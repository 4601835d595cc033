"""A run put together: configuration, the processes of a cluster, the loop, checkpoints and attempts.

May import every package but `cli`. Start with `loop.py`, then `training.py` and `cluster.py`.
"""
