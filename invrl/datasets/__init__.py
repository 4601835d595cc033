"""Conversations in files, for objectives that train without rollouts: read, tokenised and made into batches.

May import `host`, `store` and the gateway's rendering. Start with `dataset.py`.
"""
