"""The processes of a run: what starts and ends them, and what is measured of them.

Start with `cluster.py`; the process above all others is in `supervisor.py`.
"""
