"""Bounds on the bytes of logits that exist at the same time, which the projection keeps
and the memory estimate counts.

Imports neither torch nor Megatron.
"""

from typing import Literal

KEPT_BYTES = 128 << 20
"""Maximum of logits that a forward pass keeps for its backward pass, in the dtype of
the model."""
BLOCK_BYTES: dict[Literal["cpu", "cuda"], int] = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Float32 logits that are computed together: on a CPU about what stays in a core's
cache, on a GPU enough to make the cost of its kernel launches negligible."""
