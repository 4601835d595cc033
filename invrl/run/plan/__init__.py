"""Estimates of a run for `invrl plan`: closed forms, and the run itself on a clock that
jumps.

Start with `workload.py`.
"""
