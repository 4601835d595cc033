"""Places of the layout's tensors in an engine's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from invrl.errors import LayoutError
from invrl.types.weights import TensorSpec
from invrl.weights.tensors.engine_parameters import (
    EXPERTS,
    checkpoint_tensors,
    expert_tensors,
    is_padded,
)

if TYPE_CHECKING:
    import torch


def plan(
    parameters: Mapping[str, torch.Tensor], tensors: Sequence[TensorSpec]
) -> dict[str, torch.Tensor]:
    """Return the rows of the engine's parameter that hold each tensor of the layout.

    Raises LayoutError unless every tensor has a place of its shape and dtype, and every
    parameter is covered, each row once.
    """
    unplaced = {spec.name: spec for spec in tensors}
    if len(unplaced) != len(tensors):
        raise LayoutError("a tensor name occurs twice in the layout")
    places: dict[str, torch.Tensor] = {}
    for name, whole_parameter in parameters.items():
        for parameter, parts in blocks_of(name, whole_parameter):
            first_row = 0
            for part in parts:
                spec = unplaced.pop(part, None)
                if spec is None:
                    raise LayoutError(
                        f"{part}: not in the layout, so the engine's {name} is not covered"
                    )
                end_row = first_row
                if spec.shape:
                    end_row += spec.shape[0]
                _check_fits(spec, name, parameter, first_row, end_row)
                places[part] = parameter.data[first_row:end_row]
                first_row = end_row
            has_padding = first_row > 0 and is_padded(name)
            if first_row != parameter.shape[0] and not has_padding:
                raise LayoutError(
                    f"{name}: the layout gives {first_row} of its {parameter.shape[0]} rows"
                )
    if unplaced:
        first_name = next(iter(unplaced))
        raise LayoutError(f"{first_name}: the engine has no such weight")
    return places


def blocks_of(
    name: str, parameter: torch.Tensor
) -> list[tuple[torch.Tensor, list[str]]]:
    """Return the tensors of rows that form a parameter (itself, or one per expert),
    each with the checkpoint tensors that it holds."""
    layer, _, last_name = name.rpartition(".experts.")
    if last_name not in EXPERTS:
        return [(parameter, checkpoint_tensors(name))]
    return [
        (rows, expert_tensors(layer, expert, last_name))
        for expert, rows in enumerate(parameter.data)
    ]


def _check_fits(
    spec: TensorSpec, name: str, parameter: torch.Tensor, first_row: int, end_row: int
) -> None:
    """Raise LayoutError unless the tensor has the shape and dtype of these rows of the
    parameter."""
    fits = (
        len(spec.shape) == parameter.dim()
        and spec.shape[1:] == tuple(parameter.shape[1:])
        and end_row <= parameter.shape[0]
        and str(parameter.dtype) == f"torch.{spec.dtype}"
    )
    if not fits:
        dtype = str(parameter.dtype).removeprefix("torch.")
        rows = f"rows {first_row}:{end_row} of the engine's {name}, {dtype} {tuple(parameter.shape)}"
        raise LayoutError(f"{spec.name}: {spec.dtype} {spec.shape} does not fit {rows}")
