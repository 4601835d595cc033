"""Micro-batches of a batch: shards of the ranks, rows that share their prefixes.

Start with `sharding.py`, then `packing.py`.
"""
