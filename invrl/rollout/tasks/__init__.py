"""Tasks: the sources and files that they come from, the curriculum, and checks of both.

Start with `tasks.py`.
"""
