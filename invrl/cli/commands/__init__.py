"""The commands, one file each: their help (the docstring of the function), their own
flags, their output.

`invrl/cli/main.py` lists them. A file holds the whole command where no other command
does a part of it; the driver of `invrl train` is in `invrl/run/incarnations/`. What
takes long to import is imported by the function that needs it, so that bad input is
refused at once.
"""
