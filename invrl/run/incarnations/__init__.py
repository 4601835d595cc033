"""One incarnation of a run, from its start or a checkpoint to its end: with rollouts,
on a file, or on saved batches.

The driver's process does this. Start with `incarnation.py`.
"""
