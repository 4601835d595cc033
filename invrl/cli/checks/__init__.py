"""Checks before a run starts: of the machine, the model folder, and everything that the
settings name.

`checklist.py` lists them with the commands that need each. A check starts no process
and leaves nothing behind.
"""
