"""The adapter of a rank's part of the model: low-rank factors beside frozen weights.

The factors are in a module of their own, `chunk.adapter`, under names of the whole
model; hooks add their outputs to those of Megatron's layers. So the layers' own code,
parameters and checkpoints are the same with and without an adapter.

Invariant: nothing but the factors has a gradient or a state of the optimizer, and the
frozen weights never change. Imported after `device.prepare()`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel

from invrl.families.model_config import HuggingFaceConfig
from invrl.families.parameter import Parameter
from invrl.families.projections import Projection
from invrl.train.adapters.low_rank import Addition, LowRank
from invrl.train.config import LoraConfig
from invrl.train.layers.experts import Experts
from invrl.train.layers.grouped_linear import supports_num_rows
from invrl.train.parallel.partitions import chunk_parameters, note_partitions

_SAVED_PREFIX = "adapter."
"""Prefix of the factors' names in a checkpoint."""


class Adapter(torch.nn.Module):
    """The adapter of one chunk of the model."""

    def __init__(
        self, chunk: GPTModel, config: HuggingFaceConfig, lora: LoraConfig, seed: int
    ) -> None:
        super().__init__()
        self.is_on = True
        """Whether the outputs are added. Off, the model is its base."""
        self.drops = False
        """Whether dropout is applied: in training passes."""
        self.additions: dict[str, Addition] = {}
        """Adapters by the name of their Megatron parameter in the whole model."""
        self.factors: dict[str, torch.nn.Parameter] = {}
        """This rank's factors, or its parts of them, by name."""
        self.table = factor_table(config, lora)
        own = chunk_parameters([chunk])
        for projection in lora.projections(config):
            weight = own.get(projection.parameter.megatron)
            if weight is not None:
                self._add(projection, weight, config, lora, seed)
        note_partitions(self.factors, self.table)
        modules = {
            module.weight: module
            for module in chunk.modules()
            if isinstance(getattr(module, "weight", None), torch.nn.Parameter)
        }
        for name, addition in self.additions.items():
            modules[own[name]].register_forward_hook(partial(self._hook, addition))
        by_weight = {own[name]: addition for name, addition in self.additions.items()}
        for module in chunk.modules():
            if isinstance(module, Experts):
                self._adapt_experts(module, by_weight, lora.rank)

    def _add(
        self,
        projection: Projection,
        weight: torch.Tensor,
        config: HuggingFaceConfig,
        lora: LoraConfig,
        seed: int,
    ) -> None:
        """Add the factors of a projection, of which this rank has `weight`."""
        parameter = projection.parameter
        addition = self.additions.get(parameter.megatron)
        if addition is None:
            addition = Addition(
                parameter.fusion,
                weight,
                groups=config.num_key_value_heads
                // parallel_state.get_tensor_model_parallel_world_size(),
                head_dim=config.head_dim,
            )
            self.additions[parameter.megatron] = addition
        num_rows = addition.num_rows[projection.place]
        factors = LowRank(projection, weight, num_rows, lora, seed)
        addition.factors[projection.place] = factors
        self.add_module(projection.name.replace(".", "/"), factors)
        self.factors[projection.factor_a.megatron] = factors.lora_A
        self.factors[projection.factor_b.megatron] = factors.lora_B

    def _hook(
        self,
        addition: Addition,
        _: torch.nn.Module,
        inputs: tuple[Any, ...],
        output: Any,
    ) -> Any:
        """Add to the output of a layer: a tensor, or a tensor and the bias that the
        caller adds."""
        if not self.is_on:
            return output
        added = addition.output(inputs[0], drops=self.drops)
        if isinstance(output, tuple):
            return (output[0] + added, *output[1:])
        return output + added

    def _adapt_experts(
        self,
        experts: Experts,
        by_weight: Mapping[torch.Tensor, Addition],
        rank: int,
    ) -> None:
        """Let a layer's experts compute their adapters together. Where the kernel has
        no form for the rank, they are computed one after the other, with the hooks."""
        layers = list(experts.local_experts)
        for projection in ("linear_fc1", "linear_fc2"):
            weights = [getattr(layer, projection).weight for layer in layers]
            _join_storage(weights)
            if weights[0] not in by_weight:
                continue
            if not supports_num_rows(rank, weights[0].dtype):
                experts.one_by_one = True
                continue
            additions = [by_weight[weight] for weight in weights]
            experts.additions[projection] = partial(self._experts_output, additions)

    def _experts_output(
        self,
        additions: Sequence[Addition],
        rows_PI: torch.Tensor,
        sizes_E: Sequence[int],
    ) -> torch.Tensor | None:
        """Return what is added to the outputs of a projection of all experts."""
        if not self.is_on:
            return None
        parts: list[torch.Tensor | None] = []
        for of_projection in zip(
            *(addition.factors for addition in additions), strict=True
        ):
            factors = [factor for factor in of_projection if factor is not None]
            parts.append(
                LowRank.grouped(factors, rows_PI, sizes_E, drops=self.drops)
                if factors
                else None
            )
        return additions[0].joined(parts)

    def sharded_state(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return the factors in the form of Megatron's checkpoints, by name."""
        state: dict[str, Any] = {}
        for entry in self.table:
            factor = self.factors.get(entry.megatron)
            if factor is not None:
                state[entry.megatron] = _sharded(entry, factor, metadata)
        return state

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load what `sharded_state` has, filled."""
        with torch.no_grad():
            for name, factor in self.factors.items():
                factor.copy_(state[name])


def _join_storage(weights: Sequence[torch.nn.Parameter]) -> None:
    """Lay frozen weights of one shape behind each other, so that grouped products do
    not copy them."""
    stack = torch.stack([weight.detach() for weight in weights])
    for weight, part in zip(weights, stack, strict=True):
        weight.data = part


def _sharded(
    entry: Parameter, factor: torch.nn.Parameter, metadata: Mapping[str, Any]
) -> ShardedTensor:
    offsets: list[tuple[int, int, int]] = []
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    if entry.expert is not None:
        replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
    elif entry.divided_dimension is None:
        replica = (0, tensor_rank, metadata["dp_cp_group"].rank())
    else:
        num_parts = parallel_state.get_tensor_model_parallel_world_size()
        offsets.append((entry.divided_dimension, tensor_rank, num_parts))
        replica = (0, 0, metadata["dp_cp_group"].rank())
    return ShardedTensor.from_rank_offsets(
        f"{_SAVED_PREFIX}{entry.megatron}", factor, *offsets, replica_id=replica
    )


def attach_adapters(
    chunks: Sequence[Any], config: HuggingFaceConfig, lora: LoraConfig, seed: int
) -> None:
    """Freeze the chunks of a model, and give each its adapter. Call it before DDP and
    the optimizer are built."""
    for chunk in chunks:
        chunk.requires_grad_(False)
        chunk.adapter = Adapter(chunk, config, lora, seed)
    if lora.dropout:
        # Ranks have other tokens or other columns, whose dropout is independent.
        torch.manual_seed(seed + 1 + torch.distributed.get_rank())


def factor_table(config: HuggingFaceConfig, lora: LoraConfig) -> list[Parameter]:
    """Return the factors of the whole model, in the order of their projections."""
    return [
        factor
        for projection in lora.projections(config)
        for factor in (projection.factor_a, projection.factor_b)
    ]


def own_factors(chunks: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the factors of a rank's chunks by name; empty without an adapter."""
    factors: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        if chunk.adapter is not None:
            factors |= chunk.adapter.factors
    return factors


@contextmanager
def adapters_off(chunks: Sequence[Any]) -> Iterator[None]:
    """Let the chunks compute their base. Changes nothing without an adapter."""
    adapters = [chunk.adapter for chunk in chunks if chunk.adapter is not None]
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


class MergedWeights(Mapping[str, torch.Tensor]):
    """The parameters of a rank's chunks with the adapters in them, each computed when
    it is read, so that there is no second model."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._own = chunk_parameters(chunks)
        self._merged: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        for chunk in chunks:
            for name, addition in chunk.adapter.additions.items():
                self._merged[name] = addition.merged

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self._own[name]
        merged = self._merged.get(name)
        return weight if merged is None else merged(weight)

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)
