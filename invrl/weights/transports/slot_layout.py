"""The place of each tensor in a slot of the arena: as in the engine's own parameters.

Tensors that an engine fuses into one parameter lie back to back, in the engine's order,
and a tensor over the vocabulary is followed by room for the engine's padding. An engine
may therefore point a whole parameter at the slot. Names, shapes and dtypes decide, so
that trainer and engines compute the same layout; an engine checks it against its
parameters before it relies on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from invrl.errors import LayoutError
from invrl.interfaces import WeightLayout
from invrl.types.weights import TensorSpec
from invrl.weights.tensors.engine_parameters import engine_parameter, padded_rows
from invrl.weights.tensors.tensor_spec import num_bytes

_ALIGNMENT = 64
"""Alignment of every parameter, in bytes."""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    offsets: Mapping[str, int]
    """Bytes from the beginning of the slot, by tensor, in the order of the weight
    layout."""
    num_bytes: int


def slot_layout(layout: WeightLayout) -> SlotLayout:
    """Compute the slot's layout. Raises LayoutError for a name that occurs twice."""
    offsets = {spec.name: 0 for spec in layout}
    if len(offsets) != len(layout):
        raise LayoutError("a tensor name occurs twice in the layout")
    end = 0
    for parameter, specs in _fused(layout):
        for spec in specs:
            offsets[spec.name] = end
            end += num_bytes(spec)
        last = specs[-1]
        if last.shape and last.shape[0]:
            row_bytes = num_bytes(last) // last.shape[0]
            end += row_bytes * (padded_rows(parameter, last.shape[0]) - last.shape[0])
        end = -(-end // _ALIGNMENT) * _ALIGNMENT
    return SlotLayout(offsets, end)


def _fused(layout: WeightLayout) -> list[tuple[str, list[TensorSpec]]]:
    """Return the tensors of each engine parameter, in the engine's order. Tensors of
    another dtype, or with rows of another shape, are never in one parameter."""
    places: dict[tuple[object, ...], list[tuple[tuple[int, int], TensorSpec]]] = {}
    names: dict[tuple[object, ...], str] = {}
    for spec in layout:
        parameter, place = engine_parameter(spec.name)
        key = (parameter, spec.dtype, spec.shape[1:])
        names[key] = parameter
        places.setdefault(key, []).append((place, spec))
    fused: list[tuple[str, list[TensorSpec]]] = []
    for key, specs in places.items():
        specs.sort(key=lambda placed: placed[0])
        fused.append((names[key], [spec for _, spec in specs]))
    return fused
