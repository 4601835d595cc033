"""Micro-batches of a batch: shards of the ranks, sequences that share their prefixes.

Start with `sharding.py`, then `packing.py`.
"""
