"""The critic: its model and optimizer, and ranks of its own where a run gives it some.

Start with `critic.py`.
"""
