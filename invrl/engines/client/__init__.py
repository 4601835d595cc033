"""Requests to one engine or to the router, and checks of the replies.

Start with `sglang_client.py`; `weight_receiver.py` makes the calls of a weight update.
"""
