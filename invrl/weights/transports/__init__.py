"""The transports of a weight update: shared memory, a broadcast, files and buckets.

The table of transports is in the docstring of `invrl.weights`.
"""
