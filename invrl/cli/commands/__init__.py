"""The commands, one file each: their help (the docstring of the function), their own
flags, their output.

`invrl/cli/main.py` lists them. Work beyond the command line lives in the other
packages.
"""
