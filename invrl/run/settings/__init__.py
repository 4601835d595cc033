"""All settings of a run: composed, checked against each other, and written into its
folder.

Start with `config.py`.
"""
