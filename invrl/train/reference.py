"""A frozen model, the reference or a teacher: other weights for the one model, which compute in the place of
the trained ones.

There is no second model. While `in_place` is open, the parameters of the model's chunks show the reference's
weights, and the trained weights, their gradients and the optimizer's state stay where they are. A rank holds
only its own parts of the reference, in the layout of the policy.

Invariant: outside `in_place`, and after whatever ended it, every parameter shows its trained weights.
Imported after `device.prepare()`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import torch

from invrl.train import device
from invrl.train.families.model_config import HuggingFaceConfig
from invrl.train.model import PolicyModel
from invrl.train.parallel.partitions import parameters_of
from invrl.train.weights import read_weights

Placement = Literal["cpu", "cpu_by_layer", "device"]
"""As the setting `reference_placement` describes them."""


class FrozenReference:
    """One rank's parts of the reference's weights."""

    def __init__(
        self,
        chunks: Sequence[PolicyModel],
        config: HuggingFaceConfig,
        folder: str | Path,
        *,
        placement: Placement,
    ) -> None:
        """`folder`: has the weights, of a model like that of `chunks`. Raises TrainError unless they fit."""
        own_parameters = parameters_of(chunks)
        weights = {
            name: _kept(tensor, own_parameters[name], placement)
            for name, tensor in read_weights(own_parameters, config, folder)
        }
        exchange = {own_parameters[name]: weight for name, weight in weights.items()}
        self._layers: list[tuple[torch.nn.Module, _Exchange]] = []
        if placement == "cpu_by_layer":
            for layer in [layer for chunk in chunks for layer in chunk.decoder.layers]:
                of_layer: dict[torch.Tensor, torch.Tensor] = {}
                for parameter in layer.parameters():
                    of_layer[parameter] = exchange.pop(parameter)
                self._layers.append((layer, _Exchange(of_layer)))
        self._rest = _Exchange(exchange)
        """What is brought in whole: everything, or what is in no layer."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The chunks compute with the reference's weights. For passes without gradient."""
        with ExitStack() as stack:
            stack.callback(self._rest.put_back)
            self._rest.bring_in()
            for layer, exchange in self._layers:
                stack.callback(exchange.put_back)  # if the layer fails
                stack.callback(layer.register_forward_pre_hook(_hook(exchange.bring_in)).remove)
                stack.callback(layer.register_forward_hook(_hook(exchange.put_back)).remove)
            yield


class _Exchange:
    """Parameters whose weights are exchanged together."""

    def __init__(self, weights: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._weights = weights
        self._trained: list[tuple[torch.Tensor, torch.Tensor]] = []
        """While the reference's weights are in."""

    def bring_in(self) -> None:
        for parameter, weight in self._weights.items():
            self._trained.append((parameter, parameter.data))
            parameter.data = weight.to(parameter.device, parameter.dtype, non_blocking=True)

    def put_back(self) -> None:
        """Nothing where the trained weights are in."""
        for parameter, trained in self._trained:
            parameter.data = trained
        self._trained.clear()


def _kept(tensor: torch.Tensor, parameter: torch.Tensor, placement: Placement) -> torch.Tensor:
    """A copy as it is kept between passes. By layer it stays in the dtype of the file, if that is smaller
    than the model's: no value changes, and the wider copies never exist all at once."""
    dtype = parameter.dtype
    if placement == "cpu_by_layer" and tensor.dtype.itemsize < dtype.itemsize:
        dtype = tensor.dtype
    if placement == "device":
        return tensor.to(parameter.device, dtype, copy=True)
    weight = tensor.to(dtype, copy=True)
    return weight.pin_memory() if device.on_cuda() else weight


def _hook(exchange: Callable[[], None]) -> Callable[..., None]:
    """A hook of a module, which is called with the module's arguments."""
    return lambda *_: exchange()
