"""The trainer's end of weight updates over ranks of the pool, and what an engine must
hold after them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rank_pool import Trainer
from safetensors.torch import load_file

from invrl.interfaces import StagedWeights, WeightLayout
from invrl.types.weights import WeightVersion
from invrl.user_code.model_folder import tensor_files
from invrl.weights.tensors.tensor_spec import checksum


class PoolSender:
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    async def layout(self) -> WeightLayout:
        return self._trainer.each("layout")[0]

    async def stage(self, version: WeightVersion) -> StagedWeights:
        return self._trainer.each("stage", version)[0]

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        return self._trainer.logprobs(prompts)


def folder_checksums(model: Path) -> dict[str, str]:
    """Of the tensors in a folder's safetensors files, by name."""
    files = set(tensor_files(model).values())
    return {
        name: checksum(tensor)
        for file in files
        for name, tensor in load_file(file).items()
    }
