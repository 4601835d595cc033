"""Weights of the trainer: read from a Hugging Face folder, exported to one, and staged
for the engines.

`conversion.py` maps names and shapes. The `*_staging.py` files are the trainer's end of
a weight transport each; the engines' ends are in `invrl/weights/`.
"""
