"""How one Megatron parameter is made of Hugging Face tensors: the vocabulary of the name files.

Invariant: `split(join(tensors)) == tensors`, byte for byte. A name file is a table; how tensors are
fused is here, once. (With tensor parallelism each tensor is sliced before `join` and gathered after
`split`; this table stays as it is.)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Fusion = Literal["plain", "qkv", "stack"]
"""plain: one tensor as it is. qkv: rows interleaved by key-value group (its queries, its key, its
value). stack: one under the other (gate, up)."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """`{}` in the names is the layer's number."""

    megatron: str
    hugging_face: tuple[str, ...]
    fusion: Fusion = "plain"

    def at(self, layer: int) -> Parameter:
        names = tuple(name.format(layer) for name in self.hugging_face)
        return Parameter(self.megatron.format(layer), names, self.fusion)


def in_layer(megatron: str, *hugging_face: str, fusion: Fusion = "plain") -> Parameter:
    """A parameter by its names within a decoder layer."""
    names = tuple(f"model.layers.{{}}.{name}" for name in hugging_face)
    return Parameter(f"decoder.layers.{{}}.{megatron}", names, fusion)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family's parameters in the order in which they are sent, and what its attention has extra.
    What an engine fuses (q, k, v; gate, up) stands back to back."""

    before: tuple[Parameter, ...]
    layer: tuple[Parameter, ...]
    after: tuple[Parameter, ...]
    head: Parameter
    """Absent where the embedding is tied."""
    qkv_bias: bool = False
    qk_norm: bool = False
    default_window: int | None = None
    """How far attention reaches where config.json does not mention `sliding_window`, as transformers has it;
    None: the family has no such window."""

    def parameters(self, *, layers: int, tied: bool) -> list[Parameter]:
        numbered = [parameter.at(layer) for layer in range(layers) for parameter in self.layer]
        return [*self.before, *numbered, *self.after, *(() if tied else (self.head,))]


def join(fusion: Fusion, tensors: list[torch.Tensor], *, groups: int) -> torch.Tensor:
    """Hugging Face tensors -> the Megatron parameter. `groups`: key-value heads."""
    import torch

    if fusion == "plain":
        (tensor,) = tensors
        return tensor
    if fusion == "stack":
        return torch.cat(tensors)
    by_group = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def split(fusion: Fusion, tensor: torch.Tensor, *, groups: int, head_dim: int) -> list[torch.Tensor]:
    """The inverse of `join`. Views where possible; each is contiguous."""
    if fusion == "plain":
        return [tensor]
    if fusion == "stack":
        return list(tensor.chunk(2))
    by_group = tensor.reshape(groups, -1, *tensor.shape[1:])
    rows = [by_group.shape[1] - 2 * head_dim, head_dim, head_dim]
    return [part.flatten(0, 1).contiguous() for part in by_group.split(rows, dim=1)]
