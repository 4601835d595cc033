"""Destinations of a run's phases, metrics and messages: files, trackers, traces and the
console.

Start with `sinks.py`.
"""
