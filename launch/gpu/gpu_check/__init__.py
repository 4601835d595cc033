"""Proves the paths that need a GPU, one stage after the other, on a machine with
one."""
