"""The reference, or a teacher: other weights for the one model, which replace the
trained ones in a pass.

There is no second model. While `in_place` is open, the parameters of the model's chunks
show the reference's weights, and the trained weights, their gradients and the
optimizer's state stay where they are. A rank holds only its own parts of the reference,
in the layout of the policy.

It is frozen, unless the settings let it follow the policy; then its weights are saved
with the checkpoint.

Invariant: outside of `in_place`, however it ended, every parameter shows its trained
weights. Imported after `device.prepare()`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from invrl.families.model_config import HuggingFaceConfig
from invrl.train.adapters.adapter import adapters_off
from invrl.train.model.policy_model import PolicyModel
from invrl.train.parallel.partitions import chunk_parameters
from invrl.train.runtime import device
from invrl.train.weights.conversion import read_weights

SAVED_PREFIX = "reference."
"""Prefix of its weights' names in a checkpoint."""
Placement = Literal["cpu", "cpu_by_layer", "device"]
"""Values of the setting `reference_placement`."""


class BaseReference:
    """The reference of an adapter: the model itself without it. It has no weights of
    its own."""

    def __init__(self, chunks: Sequence[PolicyModel]) -> None:
        self._chunks = chunks

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the chunks compute without their adapters."""
        with adapters_off(self._chunks):
            yield


class FrozenReference:
    """One rank's parts of the reference's weights."""

    def __init__(
        self,
        chunks: Sequence[PolicyModel],
        config: HuggingFaceConfig,
        folder: str | Path,
        *,
        placement: Placement,
        is_averaged: bool = False,
    ) -> None:
        """`folder` has the weights, of a model like that of `chunks`. `is_averaged`
        keeps them in float32, in which small changes are not lost. Raises TrainError
        unless they fit."""
        self._chunks = chunks
        own_parameters = chunk_parameters(chunks)
        weights = {
            name: _kept(tensor, own_parameters[name], placement, is_averaged)
            for name, tensor in read_weights(own_parameters, config, folder)
        }
        exchange = {own_parameters[name]: weight for name, weight in weights.items()}
        self._weights = dict(exchange)
        self._layers: list[tuple[torch.nn.Module, _Exchange]] = []
        if placement == "cpu_by_layer":
            for layer in [layer for chunk in chunks for layer in chunk.decoder.layers]:
                of_layer: dict[torch.Tensor, torch.Tensor] = {}
                for parameter in layer.parameters():
                    of_layer[parameter] = exchange.pop(parameter)
                self._layers.append((layer, _Exchange(of_layer)))
        self._rest = _Exchange(exchange)
        """Weights exchanged as a whole: everything, or those in no layer."""

    def follow(self, share: float) -> None:
        """Move this share towards the trained weights; 1: become the policy. Call it
        outside of `in_place`. Not for the placement `cpu_by_layer`, which may keep
        weights in fewer bits.

            reference <- (1 - share) reference + share trained

        TR-DPO's soft and hard update (arXiv 2404.09656, section 3).
        """
        for parameter, weight in self._weights.items():
            trained = parameter.data.to(weight.device, weight.dtype)
            if share == 1.0:
                weight.copy_(trained)
            else:
                weight.lerp_(trained, share)

    def saved(self, model: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the reference's own tensors for the entries of `model`, Megatron's
        sharded state of a chunk, by their names there. Entries of a checkpoint that are
        no weights are left out."""
        tensors: dict[str, torch.Tensor] = {}
        for name, entry in model.items():
            data = getattr(entry, "data", None)
            if isinstance(data, torch.Tensor) and data in self._weights:
                tensors[name] = self._weights[data]
        return tensors

    def sharded(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return `saved` in the form of `model`, each under its own name after
        `reference.`."""
        state: dict[str, Any] = {}
        for name, weight in self.saved(model).items():
            entry = model[name]
            changes: dict[str, Any] = {
                "key": f"{SAVED_PREFIX}{entry.key}",
                "data": weight,
            }
            if not isinstance(entry, ShardedTensorFactory):
                changes["dtype"] = weight.dtype
            state[name] = replace(entry, **changes)
        return state

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the chunks compute with the reference's weights, without adapters. For
        passes without gradient."""
        with ExitStack() as stack:
            stack.enter_context(adapters_off(self._chunks))
            stack.callback(self._rest.put_back)
            self._rest.bring_in()
            for layer, exchange in self._layers:
                stack.callback(exchange.put_back)  # if the layer fails
                stack.callback(
                    layer.register_forward_pre_hook(_hook(exchange.bring_in)).remove
                )
                stack.callback(
                    layer.register_forward_hook(_hook(exchange.put_back)).remove
                )
            yield


@dataclass(frozen=True, slots=True, eq=False)
class _Exchange:
    """Parameters whose weights are exchanged together."""

    weights: Mapping[torch.Tensor, torch.Tensor]
    trained: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Trained weights, while the reference's are in."""

    def bring_in(self) -> None:
        for parameter, weight in self.weights.items():
            self.trained.append((parameter, parameter.data))
            parameter.data = weight.to(
                parameter.device, parameter.dtype, non_blocking=True
            )

    def put_back(self) -> None:
        """Restore the trained weights; do nothing if they are in."""
        for parameter, trained in self.trained:
            parameter.data = trained
        self.trained.clear()


def _kept(
    tensor: torch.Tensor,
    parameter: torch.Tensor,
    placement: Placement,
    is_averaged: bool,
) -> torch.Tensor:
    """Copy a tensor as it is kept between passes. By layer it stays in the dtype of the
    file, if that is smaller than the model's: no value changes, and the wider copies
    never exist all together. `is_averaged`: in float32."""
    dtype = torch.float32 if is_averaged else parameter.dtype
    if placement == "cpu_by_layer" and tensor.dtype.itemsize < dtype.itemsize:
        dtype = tensor.dtype
    if placement == "device":
        return tensor.to(parameter.device, dtype, copy=True)
    weight = tensor.to(dtype, copy=True)
    return weight.pin_memory() if device.on_cuda() else weight


def _hook(exchange: Callable[[], None]) -> Callable[..., None]:
    """Return a hook of a module, which is called with the module's arguments."""
    return lambda *_: exchange()
