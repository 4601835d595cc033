"""The trainer: Megatron-core ranks that take batches and produce new weights.

May import `host`, `store`, `weights` and `algorithms`. Start with `step.py`; `rank.py`
is one rank.
"""
