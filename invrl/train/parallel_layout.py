"""Division of the model and the data among the trainer's ranks: one type, from the
settings to Megatron's groups.

The order of ranks is Megatron's: tensor-parallel ranks are neighbours, then come
context-parallel ranks, then data-parallel replicas, then pipeline stages. Imports
neither torch nor Megatron, so that a run can be checked before any process starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Literal

from invrl.errors import ConfigError

if TYPE_CHECKING:
    from invrl.families.model_config import HuggingFaceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Position of a rank on each axis of a layout."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """The number of ranks on each axis."""

    tensor: int = 1
    """Ranks that divide every layer's heads, its MLP, and the vocabulary; between
    layers they divide the tokens (Megatron's sequence parallelism)."""
    context: int = 1
    """Ranks that divide the tokens of every micro-batch, which allows rows as many
    times longer. Each has the weights of its stage, and in attention the keys and
    values of all tokens."""
    data: int = 1
    """Replicas of the model, each of which trains on its own shard of a batch."""
    pipeline: int = 1
    """Stages that divide the layers. The first also has the embedding, the last the
    projection onto the vocabulary and the loss."""
    first_stage_layers: int = 0
    """Layers of the first stage; 0: as many as the others."""
    last_stage_layers: int = 0
    """Layers of the last stage; 0: as many as the others."""
    virtual_pipeline: int = 1
    """Chunks of neighbouring layers of each stage. With more than one, a micro-batch
    passes all stages as often, and stages wait less for each other (Megatron's
    interleaved schedule)."""
    expert: int = 1
    """Ranks that divide the experts of every layer, and send each other the tokens that
    these compute. They are neighbours among the tensor-, context- and data-parallel
    ranks of a pipeline stage, and do not add to their number. No rank divides a single
    expert."""

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
        """Return the ranks that compute a shard of a batch together, in ascending
        order."""
        ranks = range(self.world_size)
        return tuple(rank for rank in ranks if self.coordinates(rank).data == data)

    def model_copy(self, data: int) -> Sequence[int]:
        """Return the ranks that hold one copy of the model together, in ascending
        order: those of a replica, or of neighbouring ones whose ranks divide the
        experts. (Under context parallelism several ranks have the same weights.) They
        take part in each other's forward passes. The first collects the weights."""
        num_replicas = max(1, self.expert // (self.tensor * self.context))
        first = data - data % num_replicas
        replicas = range(first, first + num_replicas)
        return tuple(
            rank
            for rank in range(self.world_size)
            if self.coordinates(rank).data in replicas
        )

    def tensor_group(self, rank: int) -> Sequence[int]:
        """Return the ranks that divide heads, MLPs and vocabulary with this rank, in
        the order of their parts."""
        first = rank - self.coordinates(rank).tensor
        return range(first, first + self.tensor)

    def reporter(self, data: int) -> int:
        """Return the rank that reports for a replica: one of its last stage, which has
        loss and log-probs."""
        return self.replica(data)[-1]

    def stage_layers(self, pipeline: int, num_layers: int) -> Sequence[range]:
        """Return the layers of each chunk of a pipeline stage."""
        sizes = [
            layers // self.virtual_pipeline
            for layers in self._layers_by_stage(num_layers)
        ]
        chunks: list[range] = []
        for chunk in range(self.virtual_pipeline):
            first = chunk * sum(sizes) + sum(sizes[:pipeline])
            chunks.append(range(first, first + sizes[pipeline]))
        return chunks

    def chunk_sizes(self, num_layers: int) -> set[int]:
        """Return the numbers of layers of the chunks."""
        return {
            len(chunk)
            for stage in range(self.pipeline)
            for chunk in self.stage_layers(stage, num_layers)
        }

    def _layers_by_stage(self, num_layers: int) -> list[int]:
        """Return the number of layers of each pipeline stage. If stages do not divide
        the layers, some are left over."""
        own_numbers = self._own_numbers()
        num_others = self.pipeline - len(own_numbers)
        equal_part = 0
        if num_others:
            equal_part = (num_layers - sum(own_numbers.values())) // num_others
        return [own_numbers.get(stage, equal_part) for stage in range(self.pipeline)]

    def _own_numbers(self) -> dict[int, int]:
        """Map a stage to its number of layers, for those that differ from the rest."""
        own_numbers: dict[int, int] = {}
        if self.first_stage_layers:
            own_numbers[0] = self.first_stage_layers
        if self.last_stage_layers:
            own_numbers[self.pipeline - 1] = self.last_stage_layers
        return own_numbers

    def check(self, model: HuggingFaceConfig) -> None:
        """Raise ConfigError if the layout does not divide the model, with the numbers
        that would fit, or if the installed Megatron would compute it wrongly."""
        divided = {
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
            "intermediate_size": model.intermediate_size,
            "vocab_size": model.vocab_size,
        }
        undivided = [
            f"{name} {size}" for name, size in divided.items() if size % self.tensor
        ]
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
            raise ConfigError(
                field, self.expert, reason, "leave --expert-model-parallel-size out"
            )
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
                f"of a pipeline stage, and it must divide or be a multiple of {ranks_of_replica}, the number "
                "of tensor- times context-parallel ranks",
                f"--expert-model-parallel-size may be {_in_words(fitting)}",
            )

    def _check_stages(self, num_layers: int) -> None:
        own_sizes = {
            "num_layers_in_first_pipeline_stage": self.first_stage_layers,
            "num_layers_in_last_pipeline_stage": self.last_stage_layers,
            "virtual_pipeline_model_parallel_size": self.virtual_pipeline
            if self.virtual_pipeline > 1
            else 0,
        }
        for name, size in own_sizes.items():
            if size and self.pipeline == 1:
                raise ConfigError(
                    f"train.{name}",
                    size,
                    "there is only one pipeline stage",
                    "leave it out, or set --pipeline-model-parallel-size",
                )
        if not self._stages_have_all(num_layers):
            raise self._undivided(num_layers)
        layers_by_stage = self._layers_by_stage(num_layers)
        for layers in layers_by_stage:
            if layers % self.virtual_pipeline:
                raise ConfigError(
                    "train.virtual_pipeline_model_parallel_size",
                    self.virtual_pipeline,
                    f"it does not divide the {layers} layers of a pipeline stage",
                    f"--virtual-pipeline-model-parallel-size may be {_divisors(gcd(*layers_by_stage))}",
                )

    def _stages_have_all(self, num_layers: int) -> bool:
        """Whether every layer is in a stage, and no stage is without layers."""
        layers_by_stage = self._layers_by_stage(num_layers)
        return sum(layers_by_stage) == num_layers and min(layers_by_stage) > 0

    def _undivided(self, num_layers: int) -> ConfigError:
        """Return the error for stages whose numbers of layers do not add up to the
        model's."""
        end = (
            "first"
            if self.first_stage_layers and not self.last_stage_layers
            else "last"
        )
        setting = f"num_layers_in_{end}_pipeline_stage"
        fitting = self._fitting_end(num_layers, end)
        way_out = f"--{setting.replace('_', '-')} {fitting} fits" if fitting else ""
        own_numbers = self._own_numbers()
        if not own_numbers:
            divisors = f"--pipeline-model-parallel-size may be {_divisors(num_layers)}"
            return ConfigError(
                "train.pipeline_model_parallel_size",
                self.pipeline,
                f"it does not divide the model's {num_layers} layers",
                f"{divisors}; or {way_out}" if way_out else divisors,
            )
        num_placed = sum(own_numbers.values())
        num_others = self.pipeline - len(own_numbers)
        if num_others == 0 or num_placed >= num_layers:
            reason = f"the stages whose layers are set have {num_placed} of the model's {num_layers} layers, and "
            if num_others:
                reason += f"other stages ({num_others}) need layers too"
            else:
                reason += "there is no other stage"
        else:
            reason = (
                f"the {num_others} other pipeline stages cannot have equal parts of the "
                f"{num_layers - num_placed} layers that are left of the model's {num_layers}"
            )
        return ConfigError(
            f"train.{setting}",
            own_numbers[0] if end == "first" else own_numbers[self.pipeline - 1],
            reason,
            way_out or "use fewer stages (--pipeline-model-parallel-size)",
        )

    def _fitting_end(
        self, num_layers: int, end: Literal["first", "last"]
    ) -> int | None:
        """Return a number of layers for the first or the last stage with which the
        others have equal parts, as near as possible to theirs, and virtual stages
        divide them all. None: there is none."""
        fitting: list[int] = []
        for layers in range(1, num_layers):
            candidate = replace(self, **{f"{end}_stage_layers": layers})
            is_divided = (
                gcd(*candidate._layers_by_stage(num_layers)) % self.virtual_pipeline
                == 0
            )
            if candidate._stages_have_all(num_layers) and is_divided:
                fitting.append(layers)
        return min(
            fitting,
            key=lambda layers: abs(layers * self.pipeline - num_layers),
            default=None,
        )


def _divisors(number: int) -> str:
    """Return all divisors, in words."""
    return _in_words(
        [candidate for candidate in range(1, number + 1) if number % candidate == 0]
    )


def _in_words(numbers: Sequence[int]) -> str:
    """Format the numbers that would fit."""
    words = [str(number) for number in numbers]
    if len(words) == 1:
        return f"only {words[0]}"
    return f"{', '.join(words[:-1])} or {words[-1]}"
