"""What a run does and what came of it, read from its files while it lives or after it.

Start with `run_files.py`.
"""
