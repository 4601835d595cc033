"""Sizes of an offloaded optimizer's memory. Imported without torch, so that the memory
can be estimated before any process starts."""

STAGED_GRADIENT_BYTES = 256 << 20
"""Float32 gradients that are in main memory together. A parameter with a larger
gradient is there alone. There is memory for two such groups."""
OFFLOADED_BYTES = 12
"""Bytes of a parameter in main memory: float32 master weight and two moments."""
