"""Sessions from their opening to the outcome of a closed session.

Start with `lifecycle.py`; `rollout_summary.py` builds the outcome.
"""
