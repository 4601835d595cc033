"""How many bytes of logits exist at once: bounds that the projection keeps and the
memory estimate counts.

Imports neither torch nor Megatron.
"""

from typing import Literal

KEPT_BYTES = 128 << 20
"""Most logits that a forward pass keeps for its backward pass, in the dtype of the
model."""
BLOCK_BYTES: dict[Literal["cpu", "cuda"], int] = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Float32 logits that are computed at once: on a CPU about what stays in a core's
cache, on a GPU enough to make the cost of its kernel launches negligible."""
