"""How the trainer's ranks divide the model and the data: one type, from the settings to Megatron's groups.

The order of ranks is Megatron's: tensor-parallel ranks are neighbours, then come context-parallel ranks, then
data-parallel replicas, then pipeline stages.
Imports neither torch nor Megatron, so that a run can be checked before any process starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from invrl.errors import ConfigError

if TYPE_CHECKING:
    from invrl.train.families.model_config import HuggingFaceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's place on each axis of a layout."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """The number of ranks on each axis."""

    tensor: int = 1
    """Ranks that divide every layer's heads, its MLP, and the vocabulary; between layers they divide the
    tokens (Megatron's sequence parallelism)."""
    context: int = 1
    """Ranks that divide the tokens of every micro-batch, so that a row may be as many times longer. Each has
    the weights of its stage, and in attention the keys and values of all tokens."""
    data: int = 1
    """Replicas of the model, each of which trains on its own shard of a batch."""
    pipeline: int = 1
    """Stages that divide the layers. The first has the embedding too, the last the projection onto the
    vocabulary and the loss."""
    virtual_pipeline: int = 1
    """Chunks of neighbouring layers that each stage has. With more than one, a micro-batch passes all stages
    as often, and stages wait less for each other (Megatron's interleaved schedule)."""

    expert: int = 1
    """Ranks that divide the experts of every layer, and send each other the tokens that these compute. They
    are neighbours among the tensor-, context- and data-parallel ranks of a pipeline stage, to whose number
    they do not add. No rank divides a single expert."""

    @property
    def world_size(self) -> int:
        return self.tensor * self.context * self.data * self.pipeline

    def coordinates(self, rank: int) -> Coordinates:
        return Coordinates(
            tensor=rank % self.tensor,
            context=rank // self.tensor % self.context,
            data=rank // (self.tensor * self.context) % self.data,
            pipeline=rank // (self.tensor * self.context * self.data),
            expert=rank % self.expert,
        )

    def replica(self, data: int) -> Sequence[int]:
        """The ranks that compute a shard of a batch together, in ascending order."""
        ranks = range(self.world_size)
        return tuple(rank for rank in ranks if self.coordinates(rank).data == data)

    def model_copy(self, data: int) -> Sequence[int]:
        """The ranks that hold one copy of the model together, in ascending order: those of a replica, or of
        neighbouring ones whose ranks divide the experts. (Under context parallelism several ranks have the
        same weights.) They take part in each other's forward passes. The first collects the weights."""
        num_replicas = max(1, self.expert // (self.tensor * self.context))
        first = data - data % num_replicas
        replicas = range(first, first + num_replicas)
        return tuple(rank for rank in range(self.world_size) if self.coordinates(rank).data in replicas)

    def tensor_group(self, rank: int) -> Sequence[int]:
        """The ranks that divide the rank's heads, MLPs and part of the vocabulary with it, in the order of
        their parts."""
        first = rank - self.coordinates(rank).tensor
        return range(first, first + self.tensor)

    def reporter(self, data: int) -> int:
        """The rank that answers for a replica: one of its last stage, which has loss and log-probs."""
        return self.replica(data)[-1]

    def layers_of(self, pipeline: int, num_layers: int) -> Sequence[range]:
        """The layers of each chunk of a pipeline stage."""
        layers_of_chunk = num_layers // (self.pipeline * self.virtual_pipeline)
        chunks: list[range] = []
        for chunk in range(self.virtual_pipeline):
            first = (chunk * self.pipeline + pipeline) * layers_of_chunk
            chunks.append(range(first, first + layers_of_chunk))
        return chunks

    def check(self, model: HuggingFaceConfig) -> None:
        """Raises ConfigError where the layout does not divide the model, with the numbers that would fit, and
        where the installed Megatron would compute it wrongly."""
        divided = {
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
            "intermediate_size": model.intermediate_size,
            "vocab_size": model.vocab_size,
        }
        undivided = [f"{name} {size}" for name, size in divided.items() if size % self.tensor]
        if undivided:
            raise ConfigError(
                "train.tensor_model_parallel_size",
                self.tensor,
                f"it does not divide the model's {', '.join(undivided)}",
                f"--tensor-model-parallel-size may be {_divisors(gcd(*divided.values()))}",
            )
        self._check_stages(model.num_hidden_layers)
        self._check_experts(model)

    def _check_experts(self, model: HuggingFaceConfig) -> None:
        if self.expert == 1:
            return
        field = "train.expert_model_parallel_size"
        if model.experts is None:
            reason = f"a {model.model_type} model has no experts"
            raise ConfigError(field, self.expert, reason, "leave --expert-model-parallel-size out")
        ranks_of_replica = self.tensor * self.context
        ranks_of_stage = ranks_of_replica * self.data
        fitting = [
            size
            for size in range(1, gcd(model.experts.count, ranks_of_stage) + 1)
            if model.experts.count % size == 0
            and ranks_of_stage % size == 0
            and (ranks_of_replica % size == 0 or size % ranks_of_replica == 0)
        ]
        if self.expert not in fitting:
            raise ConfigError(
                field,
                self.expert,
                f"it must divide the {model.experts.count} experts of a layer and the {ranks_of_stage} ranks "
                f"of a pipeline stage, and divide the {ranks_of_replica} of them that compute a shard "
                "together, or be a multiple of these",
                f"--expert-model-parallel-size may be {_in_words(fitting)}",
            )

    def _check_stages(self, num_layers: int) -> None:
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ConfigError(
                "train.virtual_pipeline_model_parallel_size",
                self.virtual_pipeline,
                "there is only one pipeline stage, which waits for no other",
                "leave it out, or set --pipeline-model-parallel-size",
            )
        if num_layers % self.pipeline:
            raise ConfigError(
                "train.pipeline_model_parallel_size",
                self.pipeline,
                f"it does not divide the model's {num_layers} layers",
                f"--pipeline-model-parallel-size may be {_divisors(num_layers)}",
            )
        layers_of_stage = num_layers // self.pipeline
        if layers_of_stage % self.virtual_pipeline:
            raise ConfigError(
                "train.virtual_pipeline_model_parallel_size",
                self.virtual_pipeline,
                f"it does not divide the {layers_of_stage} layers of a pipeline stage",
                f"--virtual-pipeline-model-parallel-size may be {_divisors(layers_of_stage)}",
            )


def _divisors(number: int) -> str:
    """All divisors, in words."""
    return _in_words([candidate for candidate in range(1, number + 1) if number % candidate == 0])


def _in_words(numbers: Sequence[int]) -> str:
    """Those that would fit."""
    words = [str(number) for number in numbers]
    if len(words) == 1:
        return f"only {words[0]}"
    return f"{', '.join(words[:-1])} or {words[-1]}"
