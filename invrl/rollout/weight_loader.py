"""What runs inside SGLang's scheduler process: check, load and digest weights on request.

SGLang calls `run(model, named_tensors)` for `/update_weights_from_tensor` with our `load_format`. The request
is the NAME of one empty tensor (JSON, `LoaderRequest`), the answer a file (`LoaderReply`). Invariant: `run`
never raises, because SGLang shuts the server down on an exception and ignores a return value; nothing is
written before the whole plan has been checked. The other end is `weight_receiver`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import msgspec

from invrl.errors import InvrlError, LayoutError, WeightSyncError
from invrl.types import TensorSpec
from invrl.weight_arena import Arena, ArenaHandle, checksum, open_arena

if TYPE_CHECKING:
    import torch

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Engine parameters that hold several checkpoint tensors, first rows first; weights and biases."""


LoaderOp = Literal["check", "load", "digest"]


class LoaderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`check`: does this layout fit? `load`: copy the arena's slot. `digest`: hash what is served."""

    op: LoaderOp
    reply_path: str
    """Of this request alone."""
    tensors: tuple[TensorSpec, ...] = ()
    """For `check` and `digest`."""
    arena: str = ""
    """ArenaHandle as JSON, for `load`."""


class LoaderReply(msgspec.Struct, frozen=True, kw_only=True):
    error: str = ""
    error_is_layout: bool = False
    checksums: dict[str, str] = {}


class _Place(msgspec.Struct, frozen=True):
    """Rows [first, first + rows) of an engine parameter are the tensor `spec`."""

    spec: TensorSpec
    parameter: object
    first: int

    def view(self) -> torch.Tensor:
        parameter: torch.Tensor = self.parameter.data  # pyright: ignore[reportAttributeAccessIssue]
        return parameter.narrow(0, self.first, self.spec.shape[0])


def plan(parameters: Mapping[str, torch.Tensor], tensors: Sequence[TensorSpec]) -> list[_Place]:
    """Where each tensor lives in the engine. LayoutError unless every tensor has a place of its shape
    and dtype and every parameter is covered, each row once."""
    rows = {spec.name: spec.shape[0] if spec.shape else 1 for spec in tensors}
    if len(rows) != len(tensors):
        raise LayoutError("a tensor name occurs twice in the layout")
    places: list[_Place] = []
    covered = dict.fromkeys(parameters, 0)
    for spec in tensors:
        home, first = _home(spec.name, parameters, rows)
        parameter = parameters[home]
        end = first + rows[spec.name]
        fits = (
            len(spec.shape) == parameter.dim()
            and spec.shape[1:] == tuple(parameter.shape[1:])
            and end <= parameter.shape[0]
            and str(parameter.dtype) == f"torch.{spec.dtype}"
        )
        if not fits:
            raise LayoutError(
                f"{spec.name}: {spec.dtype} {spec.shape} does not fit rows {first}:{end} of the engine's "
                f"{home}, {str(parameter.dtype).removeprefix('torch.')} {tuple(parameter.shape)}"
            )
        covered[home] += rows[spec.name]
        places.append(_Place(spec, parameter, first))
    for name, parameter in parameters.items():
        # SGLang pads the vocabulary; the rows beyond it belong to no token.
        padded = name.endswith(("embed_tokens.weight", "lm_head.weight")) and covered[name] > 0
        if covered[name] != parameter.shape[0] and not padded:
            raise LayoutError(f"{name}: the layout gives {covered[name]} of its {parameter.shape[0]} rows")
    return places


def _home(name: str, parameters: Mapping[str, torch.Tensor], rows: Mapping[str, int]) -> tuple[str, int]:
    """The engine parameter that holds a checkpoint tensor, and its first row there."""
    if name in parameters:
        return name, 0
    for fused, parts in FUSED.items():
        for at, part in enumerate(parts):
            if f".{part}." in name:
                home = name.replace(part, fused)
                before = [name.replace(part, other) for other in parts[:at]]
                if home in parameters and all(other in rows for other in before):
                    return home, sum(rows[other] for other in before)
    raise LayoutError(f"{name}: the engine has no such weight")


@lru_cache(maxsize=1)
def _arena(first_slot: ArenaHandle) -> Arena:
    """Kept mapped: faulting a fresh mapping costs more than the copy. The newest only."""
    return open_arena(first_slot)


def _serve(model: torch.nn.Module, request: LoaderRequest) -> dict[str, str]:
    import torch

    parameters = dict(model.named_parameters())
    if request.op == "load":
        handle = ArenaHandle.from_json(request.arena)
        views = _arena(replace(handle, slot=0)).views(handle.slot)
        places = plan(parameters, handle.tensors)
        with torch.no_grad():
            for place in places:
                place.view().copy_(views[place.spec.name])
        return {}
    places = plan(parameters, request.tensors)
    if request.op == "check":
        return {}
    return {place.spec.name: checksum(place.view()) for place in places}


def run(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's entry point. Never raises; the reply file appears whole (rename)."""
    try:
        request = msgspec.json.decode(named_tensors[0][0], type=LoaderRequest)
    except Exception:
        return  # nobody to answer; the other end sees that no reply came
    try:
        reply = LoaderReply(checksums=_serve(model, request))
    except Exception as error:
        text = str(error) if isinstance(error, InvrlError) else repr(error)
        reply = LoaderReply(error=text, error_is_layout=isinstance(error, LayoutError))
    try:
        with open(request.reply_path + ".new", "wb") as file:
            file.write(msgspec.json.encode(reply))
        os.replace(request.reply_path + ".new", request.reply_path)
    except OSError:
        return  # the other end sees that no reply came


def read_reply(path: str) -> LoaderReply:
    """Take a reply from its file. Raises WeightSyncError if there is none, LayoutError or WeightSyncError
    with what the engine says went wrong."""
    try:
        with open(path, "rb") as file:
            reply = msgspec.json.decode(file.read(), type=LoaderReply)
        os.unlink(path)
    except (OSError, msgspec.DecodeError) as error:
        raise WeightSyncError(f"the engine's weight loader left no reply: {error}") from error
    if reply.error:
        raise (LayoutError if reply.error_is_layout else WeightSyncError)(reply.error)
    return reply
