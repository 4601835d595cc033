"""The command line: one function per command, the flags, and the checks made before a run starts.

May import every package. Start with `main.py`.
"""
