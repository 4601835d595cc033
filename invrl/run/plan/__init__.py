"""What a run would take: `invrl plan`. Closed forms, and the run itself on a clock that
jumps.

Start with `workload.py`.
"""
