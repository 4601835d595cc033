"""The trainer's end of each weight carrier: the current weights, by Hugging Face name, where engines
can take them. Called by `rank.py`; the engines' end is `rollout/weight_receiver.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from invrl.interfaces import StagedWeights, WeightLayout
from invrl.train.hf_config import HuggingFaceConfig
from invrl.train.weights import export_weights, weight_specs
from invrl.types import WeightVersion
from invrl.weight_arena import ArenaWriter


class Sender(Protocol):
    """One rank's sender: `interfaces.WeightSender` without the waiting."""

    def layout(self) -> WeightLayout: ...
    def stage(self, version: WeightVersion) -> StagedWeights: ...


class ArenaSender:
    """Shared memory on this machine, two slots: the weights staged before stay whole."""

    def __init__(self, model: torch.nn.Module, config: HuggingFaceConfig, dtype: torch.dtype) -> None:
        self._model, self._config, self._dtype = model, config, dtype
        self._layout = WeightLayout(tensors=weight_specs(model, config, dtype))
        self._arena: ArenaWriter | None = None

    def layout(self) -> WeightLayout:
        return self._layout

    def stage(self, version: WeightVersion) -> StagedWeights:
        if self._arena is None:  # only the rank that sends maps the memory
            self._arena = ArenaWriter(self._layout.tensors)
        return self._arena.stage(version, export_weights(self._model, self._config, self._dtype))


SENDERS: dict[str, Callable[[torch.nn.Module, HuggingFaceConfig, torch.dtype], Sender]] = {
    "arena": ArenaSender,
}
