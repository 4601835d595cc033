"""The policy's ranks as Ray actors, and all ranks of a trainer behind one handle.

Start with `train_rank.py`, one rank; `train_handle.py` is what the driver holds.
"""
