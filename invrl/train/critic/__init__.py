"""The critic: its model and optimizer, and separate ranks if a run gives it some.

Start with `critic.py`.
"""
