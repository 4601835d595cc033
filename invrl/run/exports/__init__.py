"""Exports of a run besides its models: its rollouts as rows to train on, for a file
of data.

Start with `exported_rows.py`; `invrl export-data` writes the file.
"""
