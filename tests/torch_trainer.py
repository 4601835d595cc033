"""A trainer that is nothing but a Hugging Face model: the sender's side of real weight
updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from invrl.interfaces import StagedWeights, WeightLayout
from invrl.train.weights.delta_staging import DeltaFolders
from invrl.train.weights.disk_staging import WeightFolders
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.checksums.multilinear_checksum import whole_checksums
from invrl.weights.tensors.tensor_spec import checksum
from invrl.weights.transports.arena import ArenaWriter
from invrl.weights.transports.broadcaster import Broadcaster
from invrl.weights.transports.buckets import BucketSender, bucket_names

Tensors = dict[str, torch.Tensor]
_BUCKET_BYTES = 40_000


class TorchSender:
    """`mistake` changes what is staged (not the layout), as a wrong name mapping would;
    `spoil` changes what was staged after its checksums were taken."""

    def __init__(
        self,
        model_path: Path,
        *,
        transport: str = "arena",
        weight_folder: Path | None = None,
        checksums_add_up: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """`device`: the transport `bucket` sends as from this GPU."""
        self.model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32
        ).eval()
        specs = [
            TensorSpec(
                name=name,
                shape=tuple(p.shape),
                dtype=str(p.dtype).removeprefix("torch."),
            )
            for name, p in self.model.named_parameters()
        ]
        self.tensors = tuple(specs)
        self._writer: (
            ArenaWriter | BucketSender | WeightFolders | DeltaFolders | Broadcaster
        )
        if weight_folder is not None and transport == "delta":
            self._writer = DeltaFolders(self.tensors, weight_folder, full_every=4)
        elif weight_folder is not None:
            self._writer = WeightFolders(self.tensors, weight_folder)
        elif transport == "arena":
            self._writer = ArenaWriter(self.tensors, checksums_add_up=checksums_add_up)
        elif transport == "collective":
            self._writer = Broadcaster(self.tensors, host="127.0.0.1", timeout_s=10.0)
        else:
            self._writer = BucketSender(
                self.tensors, bucket_bytes=_BUCKET_BYTES, device=device
            )
        self.buckets_sent: list[int] = []
        self._held_version: WeightVersion | None = None
        self.mistake: Callable[[Tensors], Tensors] = lambda tensors: tensors
        self.spoil: Callable[[StagedWeights], StagedWeights] = lambda staged: staged

    @property
    def slots(self) -> Sequence[Tensors]:
        """Of the arena."""
        assert isinstance(self._writer, ArenaWriter)
        return self._writer._slots

    def parameters(self) -> Tensors:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def train(self, seed: int, size: float = 0.01) -> None:
        """Move every weight a little."""
        self._held_version = None
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += size * torch.randn(parameter.shape, generator=generator)

    def checksums(self) -> dict[str, str]:
        return {name: checksum(tensor) for name, tensor in self.parameters().items()}

    def sums(self) -> dict[str, str]:
        """Return the checksums that add up."""
        return whole_checksums(self.parameters())

    async def layout(self) -> WeightLayout:
        return self.tensors

    async def stage(self, version: WeightVersion) -> StagedWeights:
        self._held_version = version
        return self.spoil(
            self._writer.stage(version, self.mistake(self.parameters()).items())
        )

    def holds(self, version: WeightVersion) -> bool:
        return self._held_version == version

    async def bucket(self, index: int, copies: int) -> list[str]:
        assert isinstance(self._writer, BucketSender)
        self.buckets_sent.append(index)
        names = bucket_names(self.tensors, _BUCKET_BYTES)[index]
        parameters = self.parameters()
        weights = [(name, parameters[name]) for name in names]
        return self._writer.bucket(index, weights, copies)

    async def offer(self, version: WeightVersion, engines: Sequence[str]) -> list[str]:
        assert isinstance(self._writer, Broadcaster)
        return self._writer.offer(version, engines)

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        return [self.token_logprobs(ids) for ids in prompts]

    def token_logprobs(self, ids: Sequence[int]) -> NDArray[np.float32]:
        with torch.no_grad():
            logits = (
                self.model(torch.tensor([list(map(int, ids))])).logits[0, :-1].float()
            )
        picked = torch.log_softmax(logits, -1).gather(
            1, torch.tensor(list(map(int, ids[1:])))[:, None]
        )
        return picked[:, 0].numpy()
