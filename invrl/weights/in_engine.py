"""What runs inside SGLang's scheduler process: check, load and digest weights on request.

SGLang calls `run(model, named_tensors)` for `/update_weights_from_tensor` with our `load_format`. The request
is the NAME of one empty tensor (JSON, `LoaderRequest`), the answer a file (`LoaderReply`). Invariant: `run`
never raises, because SGLang shuts the server down on an exception and ignores a return value; nothing is
written before the whole plan has been checked. The other end is `weight_receiver`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from invrl.errors import InvrlError, LayoutError, WeightSyncError
from invrl.interfaces import WeightLayout
from invrl.types import TensorSpec
from invrl.weights.arena import ArenaHandle, map_arena
from invrl.weights.tensor_spec import checksum

if TYPE_CHECKING:
    import torch

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Engine parameters that hold several checkpoint tensors, first rows first; weights and biases."""


class LoaderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Does this layout fit? If so, copy the arena's slot (`arena`), or hash what is served (`digest`)."""

    reply_path: str
    """Of this request alone."""
    tensors: WeightLayout
    arena: ArenaHandle | None = None
    digest: bool = False


class LoaderReply(msgspec.Struct, frozen=True, kw_only=True):
    error: str = ""
    error_is_layout: bool = False
    checksums: dict[str, str] = {}


def plan(parameters: Mapping[str, torch.Tensor], tensors: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """The rows of the engine's parameters that hold each tensor. LayoutError unless every tensor has a
    place of its shape and dtype and every parameter is covered, each row once."""
    specs = {spec.name: spec for spec in tensors}
    if len(specs) != len(tensors):
        raise LayoutError("a tensor name occurs twice in the layout")
    places: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        fused = next((one for one in FUSED if f".{one}." in name), "")
        first = 0
        for part in [name.replace(fused, one) for one in FUSED[fused]] if fused else [name]:
            if (spec := specs.pop(part, None)) is None:
                raise LayoutError(f"{part}: the layout lacks it, so rows of the engine's {name} too")
            end = first + (spec.shape[0] if spec.shape else 0)
            fits = (
                len(spec.shape) == parameter.dim()
                and spec.shape[1:] == tuple(parameter.shape[1:])
                and end <= parameter.shape[0]
                and str(parameter.dtype) == f"torch.{spec.dtype}"
            )
            if not fits:
                raise LayoutError(
                    f"{part}: {spec.dtype} {spec.shape} does not fit rows {first}:{end} of the engine's "
                    f"{name}, {str(parameter.dtype).removeprefix('torch.')} {tuple(parameter.shape)}"
                )
            places[part] = parameter.data[first:end]
            first = end
        # SGLang pads the vocabulary; the rows beyond it belong to no token.
        padded = first > 0 and name.endswith(("embed_tokens.weight", "lm_head.weight"))
        if first != parameter.shape[0] and not padded:
            raise LayoutError(f"{name}: the layout gives {first} of its {parameter.shape[0]} rows")
    if specs:
        raise LayoutError(f"{next(iter(specs))}: the engine has no such weight")
    return places


@lru_cache(maxsize=1)
def _mapped(first_slot: ArenaHandle, layout: WeightLayout) -> Sequence[Mapping[str, torch.Tensor]]:
    """Kept mapped: faulting a fresh mapping costs more than the copy. The newest only."""
    first_slot.check()
    return map_arena(first_slot.path, layout)


def _serve(model: torch.nn.Module, request: LoaderRequest) -> dict[str, str]:
    places = plan(dict(model.named_parameters()), request.tensors)
    if request.arena is not None:
        slots = _mapped(structs.replace(request.arena, slot=0), request.tensors)
        views = slots[request.arena.slot]
        for name, place in places.items():
            place.copy_(views[name])
    return {name: checksum(place) for name, place in places.items()} if request.digest else {}


def run(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's entry point. Never raises: the other end sees that no reply came."""
    try:
        request = msgspec.json.decode(named_tensors[0][0], type=LoaderRequest)
    except Exception:
        return  # nobody to answer
    try:
        reply = LoaderReply(checksums=_serve(model, request))
    except Exception as error:
        text = str(error) if isinstance(error, InvrlError) else repr(error)
        reply = LoaderReply(error=text, error_is_layout=isinstance(error, LayoutError))
    with contextlib.suppress(OSError), open(request.reply_path, "wb") as file:
        file.write(msgspec.json.encode(reply))


def read_reply(path: str) -> LoaderReply:
    """A reply from its file. Raises WeightSyncError if there is none, LayoutError or WeightSyncError
    with what the engine says went wrong."""
    try:
        with open(path, "rb") as file:
            reply = msgspec.json.decode(file.read(), type=LoaderReply)
    except (OSError, msgspec.DecodeError) as error:
        raise WeightSyncError(f"the engine's weight loader left no reply: {error}") from error
    if reply.error:
        raise (LayoutError if reply.error_is_layout else WeightSyncError)(reply.error)
    return reply
