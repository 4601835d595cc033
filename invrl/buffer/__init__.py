"""Prompts in, rewarded groups out: what is in flight, how stale it is, and the outcome
of every rollout.

May import `host`, `store` and `algorithms`. Start with `groups/group_buffer.py`, a
pure state machine; `process/buffer_actor.py` is its process.
"""
