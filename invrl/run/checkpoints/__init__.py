"""Saves of a run, and the place where a resumed run begins.

The lowest room of `invrl/run`. Start with `checkpoints.py`.
"""
