"""Conversion between a Megatron parameter and its Hugging Face tensors, and its
tensor-parallel split.

A family file is a table of `Parameter`s; the fusion of tensors is defined only here.

Invariant: `split(join(tensors)) == tensors`, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Fusion = Literal["plain", "qkv", "stack"]
"""plain: one tensor, unchanged. qkv: rows interleaved by key-value group (its queries,
its key, its value). stack: one tensor below the other (gate, up)."""

Sharding = Literal["whole", "rows", "columns"]
"""Part of a Megatron parameter on a tensor-parallel rank. whole: all of it. rows: an
equal part of the rows of each fused tensor (with fusion "qkv": whole key-value groups).
columns: an equal part of the columns."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One Megatron parameter and its Hugging Face tensors, by name.

    In a table, `{layer}` and `{expert}` in a name stand for the numbers of the layer
    and of the expert in the whole model.
    """

    megatron: str
    hugging_face: tuple[str, ...]
    fusion: Fusion = "plain"
    sharding: Sharding = "whole"
    dtype: Literal["float32"] | None = None
    """Dtype in every model and every export; None: that of the model. Only untrained
    parameters have one: Megatron keeps them as buffers."""
    layer: int | None = None
    """Number of its layer, counted from 0; None: it is in no layer, or in all (in a
    table)."""
    expert: int | None = None
    """Number of its expert, counted from 0; None: it is in no expert, or in all (in a
    table)."""

    @property
    def is_trained(self) -> bool:
        return self.dtype is None

    @property
    def divided_dimension(self) -> int | None:
        """Dimension of its Hugging Face tensors that tensor-parallel ranks divide;
        None: each rank has them whole."""
        if self.sharding == "whole":
            return None
        return 0 if self.sharding == "rows" else 1

    def in_layer(self, layer: int) -> Parameter:
        """Return the parameter of this layer, from that of a table."""
        return replace(self._named("{layer}", layer), layer=layer)

    def in_expert(self, expert: int) -> Parameter:
        """Return the parameter of this expert, from that of a table."""
        return replace(self._named("{expert}", expert), expert=expert)

    def _named(self, placeholder: str, number: int) -> Parameter:
        return replace(
            self,
            megatron=self.megatron.replace(placeholder, str(number)),
            hugging_face=tuple(
                name.replace(placeholder, str(number)) for name in self.hugging_face
            ),
        )


def layer_parameter(
    megatron: str,
    *hugging_face: str,
    fusion: Fusion = "plain",
    sharding: Sharding = "whole",
    dtype: Literal["float32"] | None = None,
) -> Parameter:
    """Return a parameter of decoder layers, by its names within the layer."""
    names = tuple(f"model.layers.{{layer}}.{name}" for name in hugging_face)
    return Parameter(
        f"decoder.layers.{{layer}}.{megatron}", names, fusion, sharding, dtype
    )


def join(fusion: Fusion, tensors: list[torch.Tensor], *, groups: int) -> torch.Tensor:
    """Join Hugging Face tensors into the Megatron parameter. `groups` is the number of
    key-value heads."""
    import torch

    if fusion == "plain":
        (tensor,) = tensors
        return tensor
    if fusion == "stack":
        return torch.cat(tensors)
    by_group = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def split(
    fusion: Fusion, tensor: torch.Tensor, *, groups: int, head_dim: int
) -> list[torch.Tensor]:
    """Invert `join`. Returns views where possible; each is contiguous."""
    if fusion == "plain":
        return [tensor]
    if fusion == "stack":
        return list(tensor.chunk(2))
    by_group = tensor.reshape(groups, -1, *tensor.shape[1:])
    num_query_rows = by_group.shape[1] - 2 * head_dim
    queries, keys, values = by_group.split([num_query_rows, head_dim, head_dim], dim=1)
    return [part.flatten(0, 1).contiguous() for part in (queries, keys, values)]
