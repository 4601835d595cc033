"""The loop of a training run, and the parts that only it has: weight updates, turns on
shared GPUs, held-out evaluations and when they run, a teacher.

Start with `loop.py`.
"""
