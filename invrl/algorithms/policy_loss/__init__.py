"""The loss of `rl`, one file per part. Start with `losses.py`, where the parts meet."""
