"""Processes of one machine: their start, watch and end. The table of what ends which is
in the docstring of `invrl.host`."""
