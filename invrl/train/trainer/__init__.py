"""The policy's ranks as Ray actors, and all ranks of a trainer behind one handle.

Start with `train_rank.py`, one rank; the driver holds `train_handle.py`.
"""
