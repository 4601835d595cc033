"""A trainer's end of weight updates without a trainer: tensors that change from one
version to the next.

Imports torch when it is imported.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from invrl.interfaces import StagedWeights, WeightLayout
from invrl.types.weights import WeightVersion
from invrl.weights.checksums.checksums import tensor_checksums, whole_hash
from invrl.weights.tensors.tensor_spec import make_spec
from invrl.weights.transports.arena import ArenaWriter
from invrl.weights.transports.broadcaster import Broadcaster

_FACTORS = (1.03, 0.98, 0.99)
"""What the weights are multiplied with, in turns. Each changes every bfloat16 but 0, no
two in a row take back what was before, and a hundred of them shrink the weights by 2 %
only."""


class ChangingWeights:
    """A `WeightSender` that stages in an arena. Work on tensors is done in a thread, so
    that the event loop reads the tokens of streams meanwhile."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *, device: torch.device | None = None
    ) -> None:
        """`device`: the GPU that has the tensors, and takes the arena; None for the
        host's memory."""
        self._tensors = tensors
        self._hash_tensors = whole_hash(adds_up=device is not None)
        self._layout: WeightLayout = tuple(
            make_spec(name, tensor) for name, tensor in tensors.items()
        )
        self._writer = self._make_writer(device)
        self._num_changes = 0

    async def change(self) -> None:
        """Give every tensor other values."""
        factor = _FACTORS[self._num_changes % len(_FACTORS)]
        self._num_changes += 1
        await asyncio.to_thread(self._multiply, factor)

    async def checksums(self) -> dict[str, str]:
        """Of the tensors as they are, not of what was staged."""
        return await asyncio.to_thread(self._checksums)

    async def layout(self) -> WeightLayout:
        return self._layout

    async def stage(self, version: WeightVersion) -> StagedWeights:
        return await asyncio.to_thread(
            self._writer.stage, version, self._tensors.items()
        )

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        raise NotImplementedError("these tensors are no model")

    def _make_writer(self, device: torch.device | None) -> ArenaWriter | Broadcaster:
        return ArenaWriter(self._layout, device=device)

    def _multiply(self, factor: float) -> None:
        with torch.no_grad():
            for tensor in self._tensors.values():
                tensor.mul_(factor)

    def _checksums(self) -> dict[str, str]:
        return tensor_checksums(self._tensors, self._hash_tensors)


class BroadcastWeights(ChangingWeights):
    """Such a sender with the weight transport `collective`."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *, timeout_s: float
    ) -> None:
        """`timeout_s`: as a `Broadcaster` takes it."""
        self._timeout_s = timeout_s
        super().__init__(tensors)
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())

    async def offer(self, version: WeightVersion, engines: Sequence[str]) -> list[str]:
        assert isinstance(self._writer, Broadcaster)
        return self._writer.offer(version, engines)

    def _make_writer(self, device: torch.device | None) -> Broadcaster:
        return Broadcaster(self._layout, host="127.0.0.1", timeout_s=self._timeout_s)


class ChangingModel(ChangingWeights):
    """The weights of a Hugging Face model, which also computes the log-probs of canary
    prompts."""

    def __init__(self, model_path: Path, dtype: torch.dtype) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=dtype
        ).eval()
        super().__init__(dict(self._model.named_parameters()))

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        return await asyncio.to_thread(
            lambda: [self._token_logprobs(prompt) for prompt in prompts]
        )

    @torch.no_grad()
    def _token_logprobs(self, prompt: Sequence[int]) -> NDArray[np.float32]:
        ids_T = torch.tensor(prompt)
        logits_TV = self._model(ids_T[None]).logits[0, :-1].float()
        picked_T = torch.log_softmax(logits_TV, -1).gather(1, ids_T[1:, None])[:, 0]
        return picked_T.numpy()


def read_model_config(model_path: Path) -> PretrainedConfig:
    return AutoConfig.from_pretrained(model_path)


def one_billion_config() -> PretrainedConfig:
    """A Llama of 1.24 billion parameters with tied embeddings."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )


def empty_tensors(
    config: PretrainedConfig, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The parameters of such a model by their names. They take no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return dict(model.named_parameters())


def random_tensors(
    empty: Mapping[str, torch.Tensor], device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Like these, in memory, with values from 0.5 to 1."""
    place = device or torch.device("cpu")
    return {
        name: torch.empty_like(tensor, device=place).uniform_(0.5, 1.0)
        for name, tensor in empty.items()
    }
