"""Tensors of the checkpoint: their description, their slices, and their names in the
engine."""
