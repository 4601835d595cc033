"""The nodes of a Ray cluster that a run uses: which role is on which, and whether each
of them can serve the run.

Start with `placement.py`. What the nodes are asked is in `node_report.py`, and what is
refused in `cluster_check.py`. A run on one machine uses nothing of this.
"""
