"""Where a run's phases, metrics and messages go: files, trackers, traces and the
console.

Start with `sinks.py`.
"""
