"""The RL objective as independent axes: advantages, ratios, corrections, surrogates, KL and aggregation.

Pure functions; imports only the modules of `invrl/` itself. Start with `losses.py`.
"""
