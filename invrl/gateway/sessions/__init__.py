"""Sessions from their opening to the outcome that a closed session hands over.

Start with `lifecycle.py`; `rollout_summary.py` builds the outcome.
"""
