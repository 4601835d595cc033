"""Rollouts as a person reads them: what was said, what became of it, and which are
worth a look.

Start with `samples.py`.
"""
