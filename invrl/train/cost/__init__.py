"""Cost of a model in parameters, compute and memory, estimated from its folder alone.

Imported without torch, so that a run can be checked before any process starts.
"""
