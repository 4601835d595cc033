"""How one Megatron parameter is made of Hugging Face tensors: the types that a family file is written in.

A family file is a table; how tensors are fused is written here, once. With tensor parallelism each tensor
would be sliced before `join` and gathered after `split`; the tables would stay as they are.

Invariant: `split(join(tensors)) == tensors`, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Fusion = Literal["plain", "qkv", "stack"]
"""plain: one tensor, unchanged. qkv: rows interleaved by key-value group (its queries, its key, its value).
stack: one tensor below the other (gate, up)."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One Megatron parameter and its Hugging Face tensors, by name. `{}` in a name is the layer's number."""

    megatron: str
    hugging_face: tuple[str, ...]
    fusion: Fusion = "plain"

    def at(self, layer: int) -> Parameter:
        """The parameter of this layer."""
        names = tuple(name.format(layer) for name in self.hugging_face)
        return Parameter(self.megatron.format(layer), names, self.fusion)


def in_layer(megatron: str, *hugging_face: str, fusion: Fusion = "plain") -> Parameter:
    """A parameter of a decoder layer, by its names within the layer."""
    names = tuple(f"model.layers.{{}}.{name}" for name in hugging_face)
    return Parameter(f"decoder.layers.{{}}.{megatron}", names, fusion)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family's parameters in the order in which they are sent, and the special features of its attention.

    Tensors that an engine fuses (q, k, v; gate, up) stand back to back.
    """

    before: tuple[Parameter, ...]
    """Parameters before the decoder layers."""
    layer: tuple[Parameter, ...]
    """Parameters of one decoder layer."""
    after: tuple[Parameter, ...]
    """Parameters after the decoder layers."""
    head: Parameter
    """The output layer; absent where the embedding is tied."""
    qkv_bias: bool = False
    qk_norm: bool = False
    default_window: int | None = None
    """How far attention reaches where config.json does not mention `sliding_window`, as in transformers.
    None: the family has no such window."""

    def parameters(self, *, layers: int, tied: bool) -> list[Parameter]:
        """All parameters of a model with that many layers, in sending order."""
        table = list(self.before)
        for layer in range(layers):
            table += [parameter.at(layer) for parameter in self.layer]
        table += self.after
        if not tied:
            table.append(self.head)
        return table


def join(fusion: Fusion, tensors: list[torch.Tensor], *, groups: int) -> torch.Tensor:
    """Hugging Face tensors -> the Megatron parameter. `groups`: number of key-value heads."""
    import torch

    if fusion == "plain":
        (tensor,) = tensors
        return tensor
    if fusion == "stack":
        return torch.cat(tensors)
    by_group = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def split(fusion: Fusion, tensor: torch.Tensor, *, groups: int, head_dim: int) -> list[torch.Tensor]:
    """The inverse of `join`. Returns views where possible; each is contiguous."""
    if fusion == "plain":
        return [tensor]
    if fusion == "stack":
        return list(tensor.chunk(2))
    by_group = tensor.reshape(groups, -1, *tensor.shape[1:])
    num_query_rows = by_group.shape[1] - 2 * head_dim
    queries, keys, values = by_group.split([num_query_rows, head_dim, head_dim], dim=1)
    return [part.flatten(0, 1).contiguous() for part in (queries, keys, values)]
