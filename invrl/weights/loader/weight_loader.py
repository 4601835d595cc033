"""Code that runs inside SGLang's scheduler process: check, load and hash weights on
request.

A load replies with checksums of the engine's parameters, taken while it copied. They
prove that the slot held what the trainer wrote and that every byte arrived in its
place, but nothing about later changes, even within the same request. A digest reads all
parameters again after everything else, and proves what the engine serves at that
moment.

SGLang calls `run(model, named_tensors)` for `/update_weights_from_tensor` with our
`load_format`. The request is the NAME of one empty tensor (JSON, `LoaderRequest`); the
reply is a file (`LoaderReply`). The caller is `engines/client/weight_receiver.py`.

Invariant: `run` never raises, because SGLang shuts the server down on an exception and
ignores a return value. Nothing is written before the whole layout has been checked.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from invrl.errors import BroadcastError, InvrlError, LayoutError
from invrl.interfaces import WeightLayout
from invrl.types.weights import TensorSpec
from invrl.weights.checksums.checksums import (
    HashTensors,
    copy_all,
    tensor_checksums,
    xxh3_checksums,
)
from invrl.weights.checksums.multilinear_checksum import SumsInPlace
from invrl.weights.loader.loader_messages import LoaderReply, LoaderRequest
from invrl.weights.loader.parameter_places import blocks_of, plan
from invrl.weights.tensors.engine_parameters import (
    is_padded,
    padded_rows,
)
from invrl.weights.tensors.tensor_slice import EngineRank, TensorSlice, rank_slices
from invrl.weights.tensors.tensor_spec import num_bytes
from invrl.weights.transports.arena import mapped_slot
from invrl.weights.transports.broadcast import receive_weights
from invrl.weights.transports.delta_folder import load_chain
from invrl.weights.transports.slot_layout import slot_layout
from invrl.weights.transports.slot_lease import SlotLease
from invrl.weights.transports.weight_files import FetchedFiles, WeightFiles
from invrl.weights.transports.weight_folder import read_folder

if TYPE_CHECKING:
    import torch

    _Memory = list[tuple[str, int, torch.Size, tuple[int, ...], torch.dtype]]
    """Address, shape, strides and dtype of each parameter, by its name."""


_SMALL_FILE_BYTES = 64 << 20
"""More than a manifest has, or a file has in addition to its tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preparation:
    """Everything that follows from a layout and a model's parameters."""

    model: torch.nn.Module
    tensors: WeightLayout
    rank: EngineRank
    checksums_add_up: bool
    memory: _Memory
    """Memory of the parameters at that time."""
    slices: Mapping[str, TensorSlice]
    own_tensors: Sequence[TensorSpec]
    places: Mapping[str, torch.Tensor]
    hash_tensors: HashTensors

    def fits(self, request: LoaderRequest, memory: _Memory) -> bool:
        return (
            self.tensors == request.tensors
            and self.rank == request.rank
            and self.checksums_add_up == request.checksums_add_up
            and self.memory == memory
        )


_preparations: dict[int, _Preparation] = {}
"""The last one, by the model's id. Each keeps its model, so no other has that id."""


def _prepared(
    model: torch.nn.Module,
    parameters: Mapping[str, torch.Tensor],
    request: LoaderRequest,
) -> _Preparation:
    """Raises LayoutError. The preparation is kept for the next request, so that what
    the layout's check has worked out is not worked out again while generation is
    paused."""
    memory = _parameter_memory(parameters)
    kept = _preparations.pop(id(model), None)
    if kept is not None and kept.fits(request, memory):
        preparation = kept
    else:
        preparation = _prepare(model, parameters, request, memory)
    if not request.alias:  # what is kept would hold the memory that the model leaves
        _preparations[id(model)] = preparation
    return preparation


def _prepare(
    model: torch.nn.Module,
    parameters: Mapping[str, torch.Tensor],
    request: LoaderRequest,
    memory: _Memory,
) -> _Preparation:
    slices = _slices(model, parameters, request)
    own_tensors = [slices[spec.name].make_spec(spec) for spec in request.tensors]
    places = plan(parameters, own_tensors)
    return _Preparation(
        model=model,
        tensors=request.tensors,
        rank=request.rank,
        checksums_add_up=request.checksums_add_up,
        memory=memory,
        slices=slices,
        own_tensors=own_tensors,
        places=places,
        hash_tensors=_rank_hash(request, slices, places),
    )


def _parameter_memory(parameters: Mapping[str, torch.Tensor]) -> _Memory:
    return [
        (
            name,
            parameter.data_ptr(),
            parameter.shape,
            parameter.stride(),
            parameter.dtype,
        )
        for name, parameter in parameters.items()
    ]


def _answer(model: torch.nn.Module, request: LoaderRequest) -> LoaderReply:
    if request.rank.size > 1 and (request.alias or request.folder or request.chain):
        raise LayoutError(
            "an engine of several ranks takes its slices from the arena, in the mode copy"
        )
    parameters = dict(model.named_parameters())
    preparation = _prepared(model, parameters, request)
    slices = preparation.slices
    places = preparation.places
    hash_tensors = preparation.hash_tensors
    if request.alias:
        _check_alias(model, parameters, places, request.tensors)
    on_gpu = any(place.is_cuda for place in places.values())
    if on_gpu:
        _wait_for_kernels()  # a forward pass, which has a stream of its own, may still read the parameters
    checksums: dict[str, str] = {}
    aliased: tuple[str, ...] = ()
    if request.arena is not None:
        slot = mapped_slot(request.arena, request.tensors)
        if request.alias:
            views = _aliases(parameters, slot)
            lease = SlotLease(request.arena.path, request.arena.slot, writes=False)
            _point_at(model, views, lease)
            places = plan(parameters, preparation.own_tensors)
            aliased = tuple(
                name
                for name, place in places.items()
                if _is_same_memory(place, slot[name])
            )
        else:
            with SlotLease(request.arena.path, request.arena.slot, writes=False):
                sources = {name: slices[name].of(slot[name]) for name in places}
                checksums = copy_all(places, sources.items(), hash_tensors)
            _compute_derived(model)
    elif request.folder or request.chain:
        with closing(_files(request)) as files:
            if request.folder:
                tensors = read_folder(request.folder, request.tensors, files)
                checksums = copy_all(places, tensors.items(), hash_tensors)
            else:
                load_chain(request.chain, request.tensors, places, files)
        _compute_derived(model)
    elif request.broadcast is not None:
        receive_weights(request.broadcast, request.tensors, places)
        _compute_derived(model)
    if request.digest:
        checksums = tensor_checksums(places, hash_tensors)
    if on_gpu:
        _wait_for_kernels()  # the next forward pass does not wait for this stream
    return LoaderReply(checksums=checksums, aliased=aliased)


def _files(request: LoaderRequest) -> WeightFiles:
    if request.source is None:
        return WeightFiles()
    whole_bytes = sum(num_bytes(spec) for spec in request.tensors)
    return FetchedFiles(
        request.source,
        deadline_s=request.fetch_deadline_s,
        max_file_bytes=2 * whole_bytes + _SMALL_FILE_BYTES,
    )


def _slices(
    model: torch.nn.Module,
    parameters: Mapping[str, torch.Tensor],
    request: LoaderRequest,
) -> dict[str, TensorSlice]:
    """Return the slice of each tensor of the layout that this rank holds. Raises
    LayoutError."""
    specs = {spec.name: spec for spec in request.tensors}
    slices = {spec.name: TensorSlice.whole(spec.shape) for spec in request.tensors}
    if request.rank.size == 1:
        return slices
    _check_rank(model, request.rank)
    for name, whole_parameter in parameters.items():
        for parameter, parts in blocks_of(name, whole_parameter):
            if all(part in specs for part in parts):  # `plan` says what is missing
                parts_specs = [specs[part] for part in parts]
                slices |= rank_slices(name, parameter.shape, parts_specs, request.rank)
    return slices


def _check_rank(model: torch.nn.Module, rank: EngineRank) -> None:
    """Raise LayoutError if SGLang's layers belong to another rank than the request."""
    for module in model.modules():
        index = getattr(module, "tp_rank", rank.index)
        if getattr(module, "tp_size", 1) == rank.size and index != rank.index:
            raise LayoutError(
                f"the request for rank {rank.index} of the engine has reached rank {index}"
            )


def _rank_hash(
    request: LoaderRequest,
    slices: Mapping[str, TensorSlice],
    places: Mapping[str, torch.Tensor],
) -> HashTensors:
    """Return the hash of this rank's tensors."""
    if not request.checksums_add_up:
        return xxh3_checksums
    whole_shapes = {spec.name: spec.shape for spec in request.tensors}
    return SumsInPlace(places, slices, whole_shapes).slice_checksums


def _compute_derived(model: torch.nn.Module) -> None:
    """Recompute the matrices of latent attention, which SGLang derives from a
    parameter."""
    compute_derived = getattr(model, "post_load_weights", None)
    if compute_derived is not None:
        compute_derived()


def _is_same_memory(place: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        place.data_ptr() == other.data_ptr()
        and place.is_contiguous()
        and place.shape == other.shape
    )


def _check_alias(
    model: torch.nn.Module,
    parameters: Mapping[str, torch.Tensor],
    places: Mapping[str, torch.Tensor],
    layout: WeightLayout,
) -> None:
    """Raise LayoutError unless every parameter lies in a slot as it lies in the engine,
    and the model computes with nothing derived from a parameter's old memory."""
    if hasattr(model, "post_load_weights"):
        raise _not_aliased(
            "the model computes with matrices that it derives from its weights"
        )
    if any(
        getattr(module, "use_intel_amx_backend", False) for module in model.modules()
    ):
        raise _not_aliased("SGLang has packed the weights for AMX")
    offsets = slot_layout(layout).offsets
    for name, parameter in parameters.items():
        if not parameter.is_contiguous():
            raise _not_aliased(f"{name} is not in memory in one piece")
        blocks = blocks_of(name, parameter)
        tensors = [tensor for _, parts in blocks for tensor in parts]
        rows = sum(
            places[tensor].shape[0] for tensor in tensors if places[tensor].dim()
        )
        if is_padded(name) and parameter.shape[0] > padded_rows(name, rows):
            raise _not_aliased(
                f"{name} has {parameter.shape[0]} rows, a slot has room for fewer"
            )
        for tensor in tensors:
            offset = places[tensor].data_ptr() - parameter.data_ptr()
            if offsets[tensor] - offsets[tensors[0]] != offset:
                raise _not_aliased(f"{name} has {tensor} at another place than a slot")


def _not_aliased(reason: str) -> LayoutError:
    return LayoutError(
        f"the engine cannot alias the arena: {reason}. Use --weights.arena-mode copy"
    )


def _aliases(
    parameters: Mapping[str, torch.Tensor], slot: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the slot's memory in the form of each parameter. `_check_alias` must have
    passed."""
    views: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        first_tensor = blocks_of(name, parameter)[0][1][0]
        if slot[first_tensor].device != parameter.device:
            device = slot[first_tensor].device
            raise _not_aliased(
                f"{name} is in the memory of {parameter.device}, the arena in that of {device}"
            )
        views[name] = slot[first_tensor].as_strided(parameter.shape, parameter.stride())
    return views


_leases: dict[int, SlotLease] = {}
"""Leases of the slots that parameters point at, by the model's id. SGLang has one model
in a process."""


def _point_at(
    model: torch.nn.Module, views: Mapping[str, torch.Tensor], lease: SlotLease
) -> None:
    """Point the model at a slot. The trainer may then write the slot that it pointed at
    before."""
    for name, parameter in model.named_parameters():
        parameter.data = views[name]
    before = _leases.pop(id(model), None)
    _leases[id(model)] = lease
    if before is not None:
        before.release()


def _wait_for_kernels() -> None:
    import torch

    torch.cuda.synchronize()


def run(
    model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]
) -> None:
    """Handle a request, as SGLang's entry point. Never raises: after a failure the
    reply has an error, or there is no reply."""
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
        reply = LoaderReply(
            error=text,
            error_is_layout=isinstance(error, LayoutError),
            error_is_broadcast=isinstance(error, BroadcastError),
        )
    body = msgspec.json.encode(reply)
    with contextlib.suppress(OSError):
        Path(tempfile.gettempdir(), request.reply_path).write_bytes(body)
