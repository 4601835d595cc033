"""What is saved of a run and when, and where a run that resumes begins.

The lowest room of `invrl/run`. Start with `checkpoints.py`.
"""
