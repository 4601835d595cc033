"""The execution of user code: sessions and endpoints for it, the runner, and the worker
processes.

Start with `runner.py`.
"""
