"""Settings of the trainer: layout of its ranks, precision, optimizer, packing,
deadlines."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from invrl.algorithms.objectives.objectives import NO_NEEDS, Needs
from invrl.algorithms.tables import CriticConfig
from invrl.errors import ConfigError
from invrl.families.projections import ALL_LINEAR, Projection, targeted
from invrl.families.registry import FAMILIES
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.section import COMMA_SEPARATED, Section, Text

if TYPE_CHECKING:
    from invrl.families.model_config import HuggingFaceConfig

MICRO_BATCH_TOKENS = 4096
"""Packed tokens of a micro-batch, if no setting and no GPU decides."""


ADAPTER_LR = 1e-5
"""Default learning rate of an adapter: ten times that of the whole model (`docs/lora.md`)."""


class LoraConfig(Section):
    """A low-rank adapter, which is trained instead of the model. PEFT's names and
    meanings."""

    rank: PositiveInt = Field(
        32, description="rows of each A and columns of each B: PEFT's r"
    )
    alpha: PositiveFloat = Field(
        32.0, description="the product B A is multiplied by alpha / rank"
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the adapters' inputs that are set to 0 in training passes",
    )
    targets: Annotated[tuple[Text, ...], COMMA_SEPARATED] = Field(
        (ALL_LINEAR,),
        min_length=1,
        description="projections that have adapters, by their names, as q_proj,v_proj, or all-linear",
    )
    experts: Literal["each", "none"] = Field(
        "each",
        description="each: every expert has adapters for the targets; none: the experts stay as they are",
    )
    path: Text | None = Field(
        None,
        description="PEFT folder with the adapter to begin with; left out: A is random and B is 0",
    )

    @property
    def scale(self) -> float:
        """Factor of the product of B and A."""
        return self.alpha / self.rank

    def projections(self, model: HuggingFaceConfig) -> list[Projection]:
        """Return the projections of the model that have adapters. Raises ConfigError
        for a target that the model does not have."""
        return targeted(
            FAMILIES[model.model_type].parameters(model),
            self.targets,
            with_experts=self.experts == "each",
        )


class TrainConfig(Section):
    """The trainer: ranks, precision, optimizer, packing, deadlines.

    The loss and its axes are in `algorithms/config.py`."""

    data_parallel_size: PositiveInt = Field(
        1,
        description="copies of the model, each of which trains on its own part of a batch",
    )
    tensor_model_parallel_size: PositiveInt = Field(
        1,
        description="ranks that divide the heads, the MLPs and the vocabulary of one copy (and, between the "
        "layers, the tokens)",
    )
    context_parallel_size: PositiveInt = Field(
        1,
        description="ranks that divide the tokens of one micro-batch, which may hold as many times "
        "max_tokens_per_micro_batch",
    )
    pipeline_model_parallel_size: PositiveInt = Field(
        1,
        description="stages that divide the layers of one copy, each on ranks of its own",
    )
    virtual_pipeline_model_parallel_size: PositiveInt = Field(
        1,
        description="chunks of layers that each stage has, so that stages wait less for each other "
        "(Megatron's interleaved schedule)",
    )
    num_layers_in_first_pipeline_stage: PositiveInt | None = Field(
        None,
        description="layers of the first pipeline stage; left out: as many as each of the others",
    )
    num_layers_in_last_pipeline_stage: PositiveInt | None = Field(
        None,
        description="layers of the last pipeline stage, which computes the loss too; left out: as many as each of "
        "the others",
    )
    expert_model_parallel_size: PositiveInt = Field(
        1,
        description="ranks, among the tensor-, context- and data-parallel ones of a pipeline stage, that "
        "divide the experts of every layer and send each other their tokens",
    )
    record_trained_tokens: bool = Field(
        True,
        description="write the advantages and the trainer's log-probs of each step's trained tokens to "
        "RUN/trained_tokens",
    )
    train_dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="compute precision; master weights are float32 always"
    )
    lora: LoraConfig | None = Field(
        None, description="a low-rank adapter, trained instead of the model"
    )
    lr: PositiveFloat = Field(
        1e-6,
        description="learning rate (the highest of the schedule); with [lora], left out: 1e-5",
    )
    lr_warmup_steps: NonNegativeInt = Field(
        0,
        description="optimizer steps of linear warm-up: step k has k / (this + 1) of lr",
    )
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="after warm-up"
    )
    lr_decay_steps: PositiveInt | None = Field(
        None,
        description="optimizer steps, warm-up included, until the rate is lr_min (linear, cosine)",
    )
    lr_min: NonNegativeFloat = Field(
        0.0, description="learning rate at the end of the decay"
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta 1")
    adam_beta2: float = Field(0.99, ge=0, lt=1, description="AdamW beta 2")
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW weight decay")
    clip_grad: PositiveFloat | None = Field(
        1.0, description="global gradient norm bound"
    )
    moe_router_bias_update_rate: PositiveFloat | None = Field(
        None,
        description="load balancing without an auxiliary loss: after each optimizer step the router's bias "
        "of an expert with fewer tokens than the mean grows by this, that of one with more shrinks "
        "(DeepSeek-V3 was pre-trained with 0.001); only for models that have them",
    )
    max_nonfinite_steps: PositiveInt = Field(
        3,
        description="optimizer steps in a row that may be skipped because the loss or the gradient is NaN or "
        "infinite; the last of them ends the run",
    )
    max_tokens_per_micro_batch: PositiveInt | None = Field(
        None,
        description="packed tokens of one micro-batch, on each context-parallel rank; a longer conversation "
        "is a micro-batch alone; left out: 4096, on GPUs up to 16384 if the estimate of memory allows it",
    )
    max_sample_tokens: PositiveInt | None = Field(
        None,
        description="tokens of a conversation in a training run: a longer one is refused while it is "
        "sampled; left out: as many as the engines take",
    )
    reference_placement: Literal["cpu", "cpu_by_layer", "device"] = Field(
        "cpu",
        description="where a GPU rank keeps the weights of the frozen reference: 'cpu': in main memory, and "
        "on the GPU for the reference's pass; 'cpu_by_layer': one layer at a time comes to the GPU, in every "
        "micro-batch; 'device': always on the GPU. On a CPU there is one memory: 'cpu' and 'device' are the "
        "same, and 'cpu_by_layer' keeps weights in 16 bits if the folder does, also under float32 training",
    )
    share_prefixes: bool = Field(
        True,
        description="compute a prefix shared by rows of a micro-batch once (exact; with our attention)",
    )
    routing_replay: Literal["none", "trainer", "engine"] = Field(
        "none",
        description="which earlier choice of experts an update repeats (models with experts): none; trainer: "
        "that of the pass for the old log-probs (R2); engine: that of the engine which sampled (R3)",
    )
    deterministic: bool = Field(
        False,
        description="two runs of the same seed give the same weights, bit for bit; settings under which they "
        "would not are refused",
    )
    use_distributed_optimizer: bool = Field(
        True, description="shard optimizer state over all ranks"
    )
    optimizer_cpu_offload: bool = Field(
        False,
        description="keep float32 master weights and Adam's moments in main memory (12 bytes a parameter, "
        "divided as the optimizer's state is) and compute the optimizer step there; the same results, a slower step",
    )
    max_shard_gb: PositiveFloat = Field(
        50.0,
        description="largest file of weights in an exported model, in GB (10^9 bytes)",
    )
    train_start_timeout_s: PositiveFloat = Field(
        600.0, description="deadline for all ranks to be ready"
    )
    train_step_timeout_s: PositiveFloat = Field(
        1800.0, description="deadline of one training step"
    )

    @model_validator(mode="before")
    @classmethod
    def _choose_rate(cls, values: Any) -> Any:
        """Give an adapter its own default of the learning rate."""
        if not isinstance(values, dict) or values.get("lora") in (None, False):
            return values
        return {"lr": ADAPTER_LR, **values}

    @property
    def micro_batch_tokens(self) -> int:
        """Maximum number of packed tokens of a micro-batch of several rows, on all
        context-parallel ranks together."""
        tokens = self.max_tokens_per_micro_batch or MICRO_BATCH_TOKENS
        return tokens * self.context_parallel_size

    @property
    def records_experts(self) -> bool:
        """Whether engines report the experts that computed their sampled tokens."""
        return self.routing_replay == "engine"

    def computes_reference(self, needs: Needs) -> bool:
        """Whether the objective's reference has weights of its own. That of an adapter
        is the model without it."""
        return needs.reference and self.lora is None

    def check_model(
        self,
        model: HuggingFaceConfig,
        needs: Needs = NO_NEEDS,
        critic: CriticConfig | None = None,
    ) -> None:
        """Raise ConfigError if these settings do not fit the model: its layers, heads
        or experts. `needs` are those of the objective, if there is one."""
        self.layout.check(model)
        of_critic = self.critic_layout(critic)
        if of_critic is not None:
            of_critic.check(model)
        if self.routing_replay != "none" and model.experts is None:
            raise ConfigError(
                "train.routing_replay",
                self.routing_replay,
                f"a {model.model_type} model has no experts, so there is no routing to replay",
                "leave --routing-replay out",
            )
        self._check_bias_rate(model)
        if self.lora is not None:
            self.lora.projections(model)
        if needs.router_shift:
            self._check_router_shift(model)

    def _check_router_shift(self, model: HuggingFaceConfig) -> None:
        if model.experts is None:
            raise ConfigError(
                "model.model_path",
                model.model_type,
                f"a {model.model_type} model has no experts, so it has no routers whose shift could be read",
                "leave out what reads it: --ratio-weight, or an objective that needs the router shift",
            )
        if self.pipeline_model_parallel_size > 1:
            raise ConfigError(
                "train.pipeline_model_parallel_size",
                self.pipeline_model_parallel_size,
                "the router shift is a mean over all layers, and the last stage, which has the loss, does "
                "not know the routers of the others",
                "use one pipeline stage: --expert-model-parallel-size divides the experts",
            )

    def _check_bias_rate(self, model: HuggingFaceConfig) -> None:
        rate = self.moe_router_bias_update_rate
        if rate is None or (model.experts is not None and model.experts.has_bias):
            return
        if model.experts is None:
            reason = f"a model of the family {model.model_type} has no experts"
        else:
            reason = (
                f"the router of the family {model.model_type} has no bias, so the engine could not follow "
                "one that the trainer moves"
            )
        raise ConfigError(
            "train.moe_router_bias_update_rate",
            rate,
            reason,
            "leave out --moe-router-bias-update-rate",
        )

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(
            tensor=self.tensor_model_parallel_size,
            context=self.context_parallel_size,
            data=self.data_parallel_size,
            pipeline=self.pipeline_model_parallel_size,
            first_stage_layers=self.num_layers_in_first_pipeline_stage or 0,
            last_stage_layers=self.num_layers_in_last_pipeline_stage or 0,
            virtual_pipeline=self.virtual_pipeline_model_parallel_size,
            expert=self.expert_model_parallel_size,
        )

    def critic_layout(self, critic: CriticConfig | None) -> ParallelLayout | None:
        """Return the layout of the critic's separate ranks; None: it has none."""
        if critic is None or critic.data_parallel_size is None:
            return None
        return replace(self.layout, data=critic.data_parallel_size)

    def num_ranks(self, critic: CriticConfig | None) -> int:
        """Return the number of ranks of the policy, and of a critic on separate
        ranks."""
        of_critic = self.critic_layout(critic)
        return self.layout.world_size + (of_critic.world_size if of_critic else 0)
