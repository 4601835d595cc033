"""Parts of a decoder layer: attention, positions, norms and experts over packed rows.

Start with `layer_specs.py`, which assembles a layer.
"""
