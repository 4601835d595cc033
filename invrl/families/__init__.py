"""Model families: one file per family says everything that invrl knows about it.

To add a family, write such a file; `registry.py` finds it, `hf_config.py` reads it.
`family.py`, `model_config.py`, `parameter.py` and `rope.py` define its types.
"""
