"""What can be found out before a run starts: of the machine, the model folder, and what
the settings name.

`checklist.py` is the one list, and says which command needs which check. A check starts
no process and leaves nothing behind.
"""
