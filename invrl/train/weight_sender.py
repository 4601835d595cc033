"""The trainer's end of each weight carrier: the current weights, by Hugging Face name, where engines
can take them. Called by `rank.py`; the engines' end is `rollout/weight_receiver.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from invrl.interfaces import StagedWeights, WeightLayout
from invrl.train.hf_config import HuggingFaceConfig
from invrl.train.weights import export_weights, weight_specs
from invrl.types import TensorSpec, WeightVersion
from invrl.weight_arena import ArenaWriter
from invrl.weight_buckets import BucketSender


class Stage(Protocol):
    """Where a carrier puts tensors (`ArenaWriter`, `BucketSender`)."""

    def stage(self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights: ...


CARRIERS: dict[str, Callable[[Sequence[TensorSpec]], Stage]] = {"arena": ArenaWriter, "bucket": BucketSender}


class WeightStage:
    """One rank's end of a carrier: `interfaces.WeightSender` without the waiting. The weights staged
    before stay whole until the next call."""

    def __init__(
        self, carrier: str, model: torch.nn.Module, config: HuggingFaceConfig, dtype: torch.dtype
    ) -> None:
        self._carrier, self._model, self._config, self._dtype = carrier, model, config, dtype
        self._layout = WeightLayout(tensors=weight_specs(model, config, dtype))
        self._stage: Stage | None = None

    def layout(self) -> WeightLayout:
        return self._layout

    def stage(self, version: WeightVersion) -> StagedWeights:
        if self._stage is None:  # only the rank that sends takes the memory
            self._stage = CARRIERS[self._carrier](self._layout.tensors)
        return self._stage.stage(version, export_weights(self._model, self._config, self._dtype))
