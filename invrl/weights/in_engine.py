"""What runs inside SGLang's scheduler process: check, load and hash weights on request.

A load answers with checksums that were taken while it copied, of what stands in the engine's parameters. They
prove that the slot held what the trainer wrote and that every byte of it arrived in its place. They prove
nothing of what happens to a parameter afterwards, not even within the same request. A digest reads all
parameters once more when everything else is done, and proves what the engine serves at that moment.

SGLang calls `run(model, named_tensors)` for `/update_weights_from_tensor` with our `load_format`. The request
is the NAME of one empty tensor (JSON, `LoaderRequest`); the answer is a file (`LoaderReply`). The caller is
`engines/weight_receiver.py`.

Invariant: `run` never raises, because SGLang shuts the server down on an exception and ignores a return
value. Nothing is written before the whole layout has been checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from invrl.errors import InvrlError, LayoutError, WeightSyncError
from invrl.interfaces import WeightLayout
from invrl.train.families.registry import FAMILIES
from invrl.types import TensorSpec
from invrl.weights.arena import ArenaHandle, map_arena
from invrl.weights.hashed_copy import checksums_of, copy_hashed

if TYPE_CHECKING:
    import torch

FUSED = {fused: parts for family in FAMILIES.values() for fused, parts in family.engine_fusions.items()}
"""Engine parameters that hold the rows of several checkpoint tensors, in this order; weights and biases. A
name means the same in every family."""
EXPERTS = {fused: parts for family in FAMILIES.values() for fused, parts in family.engine_experts.items()}
"""Engine parameters [expert, rows, ...] of all experts of a layer, likewise."""
_PADDED = ("embed_tokens.weight", "lm_head.weight")
"""SGLang pads the vocabulary. The rows beyond it belong to no token."""


class LoaderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Check the layout, copy the arena's slot (if `arena`), read back what is served (if `digest`)."""

    reply_path: str
    """The file for the reply to this request alone."""
    tensors: WeightLayout
    arena: ArenaHandle | None = None
    digest: bool = False


class LoaderReply(msgspec.Struct, frozen=True, kw_only=True):
    error: str = ""
    error_is_layout: bool = False
    checksums: dict[str, str] = {}
    """By tensor: of the parameters as read back, or, without `digest`, of what was copied into them."""


def plan(parameters: Mapping[str, torch.Tensor], tensors: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """For each tensor of the layout the rows of the engine's parameter that hold it.

    Raises LayoutError unless every tensor has a place of its shape and dtype, and every parameter is covered,
    each row once.
    """
    unplaced = {spec.name: spec for spec in tensors}
    if len(unplaced) != len(tensors):
        raise LayoutError("a tensor name occurs twice in the layout")
    places: dict[str, torch.Tensor] = {}
    for name, whole_parameter in parameters.items():
        for parameter, parts in _blocks_of(name, whole_parameter):
            first_row = 0
            for part in parts:
                spec = unplaced.pop(part, None)
                if spec is None:
                    raise LayoutError(f"{part}: not in the layout, so the engine's {name} is not covered")
                end_row = first_row
                if spec.shape:
                    end_row += spec.shape[0]
                _check_fits(spec, name, parameter, first_row, end_row)
                places[part] = parameter.data[first_row:end_row]
                first_row = end_row
            is_padded = first_row > 0 and name.endswith(_PADDED)
            if first_row != parameter.shape[0] and not is_padded:
                raise LayoutError(f"{name}: the layout gives {first_row} of its {parameter.shape[0]} rows")
    if unplaced:
        first_name = next(iter(unplaced))
        raise LayoutError(f"{first_name}: the engine has no such weight")
    return places


def _blocks_of(name: str, parameter: torch.Tensor) -> list[tuple[torch.Tensor, list[str]]]:
    """The tensors of rows that a parameter consists of (itself, or one per expert), each with the checkpoint
    tensors that it holds."""
    layer, _, last_name = name.rpartition(".experts.")
    if last_name not in EXPERTS:
        return [(parameter, _parts_of(name))]
    return [
        (rows, [f"{layer}.experts.{expert}.{part}" for part in EXPERTS[last_name]])
        for expert, rows in enumerate(parameter.data)
    ]


def _parts_of(name: str) -> list[str]:
    """The checkpoint tensors that the engine's parameter `name` holds, first rows first."""
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return [name.replace(fused, part) for part in parts]
    return [name]


def in_one_call(name: str, next_name: str) -> bool:
    """Whether SGLang's own loader needs both tensors in the same call, because it fuses them."""
    return any(
        f".{part}." in name and next_name == name.replace(f".{part}.", f".{next_part}.")
        for parts in FUSED.values()
        for part, next_part in pairwise(parts)
    )


def _check_fits(spec: TensorSpec, name: str, parameter: torch.Tensor, first_row: int, end_row: int) -> None:
    """Raises LayoutError unless the tensor has the shape and dtype of these rows of the parameter."""
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


@lru_cache(maxsize=1)
def _mapped(first_slot: ArenaHandle, layout: WeightLayout) -> Sequence[Mapping[str, torch.Tensor]]:
    """The slots of the arena, which stays mapped: to fault in a fresh mapping costs more than the copy."""
    first_slot.check()
    return map_arena(first_slot.path, layout)


def _answer(model: torch.nn.Module, request: LoaderRequest) -> LoaderReply:
    parameters = dict(model.named_parameters())
    places = plan(parameters, request.tensors)
    checksums: dict[str, str] = {}
    arena = request.arena
    if arena is not None:
        first_slot = structs.replace(arena, slot=0)  # both slots share one mapping
        slots = _mapped(first_slot, request.tensors)
        views = slots[arena.slot]
        checksums = copy_hashed((name, place, views[name]) for name, place in places.items())
        compute_derived = getattr(model, "post_load_weights", None)
        if compute_derived is not None:
            compute_derived()  # latent attention computes with matrices that SGLang makes of a parameter
    if request.digest:
        checksums = checksums_of(places)
    return LoaderReply(checksums=checksums)


def run(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's entry point. Never raises: after a failure the reply has an error, or there is no reply."""
    try:
        request = msgspec.json.decode(named_tensors[0][0], type=LoaderRequest)
    except Exception:
        return  # it is not known where the reply should go
    try:
        reply = _answer(model, request)
    except Exception as error:
        text = repr(error)
        if isinstance(error, InvrlError):
            text = str(error)
        reply = LoaderReply(error=text, error_is_layout=isinstance(error, LayoutError))
    body = msgspec.json.encode(reply)
    with contextlib.suppress(OSError):
        Path(request.reply_path).write_bytes(body)


def read_reply(path: str) -> LoaderReply:
    """Read a reply from its file.

    Raises LayoutError or WeightSyncError with the engine's own error, WeightSyncError if there is no reply.
    """
    try:
        body = Path(path).read_bytes()
        reply = msgspec.json.decode(body, type=LoaderReply)
    except (OSError, msgspec.DecodeError) as error:
        raise WeightSyncError(f"the engine's weight loader left no reply: {error}") from error
    if reply.error and reply.error_is_layout:
        raise LayoutError(reply.error)
    if reply.error:
        raise WeightSyncError(reply.error)
    return reply
