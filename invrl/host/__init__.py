"""Processes and files on one machine: starting, watching and ending processes, signals, Ray's
environment, what is on disk.

Imports only the modules of `invrl/` itself. Start with `process.py`.
"""
