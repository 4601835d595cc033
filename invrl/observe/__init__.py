"""What a person sees of a run: metrics sinks, progress, and samples of what
the model said.

May import `store`, `host`, `buffer` and the gateway's types. Start with `sinks.py`.
"""
