"""How one Megatron parameter is made of Hugging Face tensors, and how tensor
parallelism splits it.

A family file is a table of `Parameter`s; how tensors are fused is written here, once.

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
"""What a tensor-parallel rank holds of a Megatron parameter. whole: all of it. rows: an
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
    """The dtype that it has in every model and every export; None: that of the model.
    Only what no optimizer trains has one: Megatron keeps it as a buffer."""
    layer: int | None = None
    """The number of its layer, counted from 0; None: it is in no layer, or in all (in a
    table)."""
    expert: int | None = None
    """The number of its expert, counted from 0; None: it is in no expert, or in all (in
    a table)."""

    @property
    def is_trained(self) -> bool:
        return self.dtype is None

    @property
    def divided_dimension(self) -> int | None:
        """The dimension of its Hugging Face tensors that tensor-parallel ranks divide;
        None: each rank has them whole."""
        if self.sharding == "whole":
            return None
        return 0 if self.sharding == "rows" else 1

    def in_layer(self, layer: int) -> Parameter:
        """The parameter of this layer, from that of a table."""
        return replace(self._named("{layer}", layer), layer=layer)

    def in_expert(self, expert: int) -> Parameter:
        """The parameter of this expert, from that of a table."""
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
    """A parameter of decoder layers, by its names within the layer."""
    names = tuple(f"model.layers.{{layer}}.{name}" for name in hugging_face)
    return Parameter(
        f"decoder.layers.{{layer}}.{megatron}", names, fusion, sharding, dtype
    )


def join(fusion: Fusion, tensors: list[torch.Tensor], *, groups: int) -> torch.Tensor:
    """Hugging Face tensors -> the Megatron parameter. `groups`: number of key-value
    heads."""
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
    """The inverse of `join`. Returns views where possible; each is contiguous."""
    if fusion == "plain":
        return [tensor]
    if fusion == "stack":
        return list(tensor.chunk(2))
    by_group = tensor.reshape(groups, -1, *tensor.shape[1:])
    num_query_rows = by_group.shape[1] - 2 * head_dim
    queries, keys, values = by_group.split([num_query_rows, head_dim, head_dim], dim=1)
    return [part.flatten(0, 1).contiguous() for part in (queries, keys, values)]
