"""The command line: the commands, the flags, and the checks made before a run starts.

May import every package; nothing imports it. Start with `main.py`, which lists the
commands; each is a file in `commands/`.
"""
