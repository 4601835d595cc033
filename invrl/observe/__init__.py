"""A person's view of a run: metrics sinks, progress, and samples of the model's
replies.

May import `store`, `host`, `buffer` and the gateway's types. Start with `sinks.py`.
"""
