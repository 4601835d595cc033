"""A trainer's end of adapter updates without a trainer: factors that change from one
version to the next.

B is 0, so that each version computes what the model computes, and the canary knows the
log-probs without a trainer. Imports torch when it is imported.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from invrl.families.hf_config import read_hf_config
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.train.adapters.peft_folder import (
    WEIGHTS_NAME,
    peft_layout,
    write_description,
)
from invrl.train.config import LoraConfig
from invrl.train.weights.disk_staging import WeightFolders
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.user_code.model_folder import tensor_shapes
from invrl.weights.tensors.tensor_spec import checksum, num_bytes


class ChangingAdapter:
    """A `WeightSender` of an adapter of all projections, which writes PEFT folders."""

    def __init__(self, model: Path, folder: Path, *, rank: int, dtype: str) -> None:
        lora = LoraConfig.model_validate({"rank": rank})
        shapes = tensor_shapes(model)
        projections = lora.projections(read_hf_config(model))
        self.kinds = tuple(sorted({projection.kind for projection in projections}))
        specs: list[TensorSpec] = []
        for projection in projections:
            outputs, inputs = shapes[f"{projection.name}.weight"]
            for factor, shape in (
                (projection.factor_a, (rank, inputs)),
                (projection.factor_b, (outputs, rank)),
            ):
                specs.append(TensorSpec(name=factor.megatron, shape=shape, dtype=dtype))
        self._layout = peft_layout(specs)
        self.num_bytes = sum(map(num_bytes, self._layout))
        self.bytes_moved = 0
        """Size of the file of the newest version."""
        self._generator = torch.Generator().manual_seed(0)
        self._tensors: dict[str, torch.Tensor] = {}
        self._logprobs: dict[tuple[int, ...], NDArray[np.float32]] = {}

        def describe(described: Path) -> None:
            write_description(
                described, lora, self.kinds, base_path=str(model), base_checksum=""
            )

        self._folders = WeightFolders(
            self._layout, folder, file_name=WEIGHTS_NAME, describe=describe
        )

    def expect(
        self,
        prompts: Sequence[Sequence[int]],
        logprobs: Sequence[NDArray[np.float32]],
    ) -> None:
        """Take the model's own log-probs of the canary prompts."""
        for prompt, expected in zip(prompts, logprobs, strict=True):
            self._logprobs[tuple(prompt)] = expected

    def change(self) -> None:
        """Give every A other values."""
        for spec in self._layout:
            dtype: torch.dtype = getattr(torch, spec.dtype)
            if "lora_A" in spec.name:
                drawn = torch.rand(spec.shape, generator=self._generator)
                self._tensors[spec.name] = drawn.to(dtype)
            else:
                self._tensors.setdefault(
                    spec.name, torch.zeros(spec.shape, dtype=dtype)
                )

    def checksums(self) -> dict[str, str]:
        return {name: checksum(tensor) for name, tensor in self._tensors.items()}

    async def layout(self) -> WeightLayout:
        return self._layout

    async def stage(self, version: WeightVersion) -> StagedWeights:
        staged = await asyncio.to_thread(
            self._folders.stage, version, self._tensors.items()
        )
        self.bytes_moved = (Path(staged.handle) / WEIGHTS_NAME).stat().st_size
        return staged

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        return [self._logprobs[tuple(prompt)] for prompt in prompts]
