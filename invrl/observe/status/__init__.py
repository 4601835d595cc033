"""State and outcome of a run, read from its files while it lives or after it.

Start with `run_files.py`.
"""
