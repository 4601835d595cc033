"""Conversations in files, for objectives that train without rollouts: read, tokenized
and batched.

May import `store`, and the types, the chat dialect and the rendering of `gateway`.
Start with `dataset.py`.
"""
