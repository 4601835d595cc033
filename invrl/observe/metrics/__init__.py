"""The numbers of a run: of each step, of its weights' worth, and as a Prometheus server
scrapes them.

Start with `step_metrics.py`, for Prometheus with `metric_families.py`.
"""
