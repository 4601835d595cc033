"""Code that runs in an engine's own processes: the start of SGLang, its patches and
its additional routes.

Start with `launch_sglang.py`, which applies all of them.
"""
