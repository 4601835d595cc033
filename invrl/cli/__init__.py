"""The command line: commands, flags, and the checks before a run starts.

May import every package; nothing imports it. Start with `main.py`, which lists the
commands; each is a file in `commands/`.
"""
