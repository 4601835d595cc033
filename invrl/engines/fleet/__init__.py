"""All engines and their router as one object, and the watch over them.

Start with `fleet.py`.
"""
