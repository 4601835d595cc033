"""Tables of the algorithm's settings: one for each part that a run may do without, and
one for each choice that has settings of its own."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from invrl.types.section import Section, Text

Deviation = Literal["sample", "population"]
"""Standard deviation of a group's rewards: squares divided by G - 1, or by G."""


class KlConfig(Section):
    """The KL to a frozen reference."""

    coefficient: PositiveFloat = Field(description="weight of the KL")
    estimator: Literal["k1", "k2", "k3", "unbiased"] = Field(
        "k3",
        description="unbiased: k3 with an importance weight (DeepSeek-V3.2)",
    )
    added_to: Literal["loss", "reward", "rollout_reward"] = Field(
        "loss",
        description="loss: a term of the loss; reward: a penalty of each token's reward (k1 is usual); "
        "rollout_reward: the whole rollout's, in its reward before rewards are compared (rloo, dr_grpo, raw)",
    )
    clamp: PositiveFloat | None = Field(
        10.0, description="bound of one token's estimate"
    )


class EntropyConfig(Section):
    """An entropy bonus, subtracted from the loss."""

    coefficient: NonNegativeFloat = Field(description="weight of the bonus")


class RejectionConfig(Section):
    """Tokens left out of the policy's gradient: those whose old/rollout ratio is
    outside of two bounds."""

    kind: Literal["token", "sequence", "geometric"] = Field(
        description="the ratio: that of the token, or of its sample, as product or geometric mean"
    )
    low: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="lowest ratio that is kept"
    )
    high: Annotated[float, Field(gt=1)] | None = Field(
        None, description="highest ratio that is kept"
    )


class AdvantageStdConfig(Section):
    """The standard deviation that advantages are divided by."""

    eps: PositiveFloat = Field(
        1e-4, description="added to the deviation (grpo, pass_at_k)"
    )
    floor: NonNegativeFloat = Field(
        0.0, description="smallest deviation (grpo, pass_at_k, whitening)"
    )
    estimator: Deviation = Field(
        "sample",
        description="of a group's rewards (grpo): squares divided by G - 1, or by G (population)",
    )


class OverlongConfig(Section):
    """A penalty that grows over the last tokens of a rollout (DAPO)."""

    buffer: PositiveInt = Field(
        description="last tokens of the length over which the penalty grows; it is subtracted from the "
        "final reward"
    )
    penalty: NonNegativeFloat = Field(1.0, description="largest penalty of a rollout")
    length: PositiveInt | None = Field(
        None,
        description="tokens that all turns of a rollout may sample; left out: max_new_tokens",
    )


class ReferenceConfig(Section):
    """Movement of the reference. It is frozen unless something is set here."""

    reset_steps: PositiveInt | None = Field(
        None,
        description="batches after which the current policy becomes the reference, again and again",
    )
    reset_optimizer: bool = Field(
        False,
        description="the optimizer's moments are reset whenever the reference is (ProRL)",
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="the reference is a moving average: after each batch this share of it stays and the rest "
        "is the current policy; left out: it stays frozen",
    )


class CriticConfig(Section):
    """A critic whose values give the advantages (PPO): with this table the advantage is
    gae."""

    model_path: Text | None = Field(
        None,
        description="folder or checkpoint of the model that the critic begins as, a model of the same shape, "
        "without its projection to the vocabulary; left out: that of model_path",
    )
    lr: PositiveFloat = Field(
        1e-5, description="learning rate of the critic, constant after its warm-up"
    )
    lr_warmup_steps: NonNegativeInt = Field(
        0,
        description="optimizer steps of linear warm-up of its rate: step k has k / (this + 1) of it",
    )
    clip_grad: PositiveFloat | None = Field(
        1.0, description="bound of the norm of the critic's gradient"
    )
    warmup_steps: NonNegativeInt = Field(
        0,
        description="training batches at the beginning of a run in which the critic alone learns",
    )
    data_parallel_size: PositiveInt | None = Field(
        None,
        description="copies of the critic on ranks of their own, which divide a copy as the policy's do and "
        "compute and train beside them; left out: the critic is on the policy's ranks",
    )
    gae_lambda: float = Field(
        0.95,
        ge=0.0,
        le=1.0,
        description="how far the policy's advantage looks ahead: 0: one token",
    )
    returns_lambda: float = Field(
        0.95,
        ge=0.0,
        le=1.0,
        description="lambda of the returns that the critic learns; left out: gae_lambda",
    )
    length_alpha: PositiveFloat | None = Field(
        None,
        description="in the place of gae_lambda each sample has 1 - 1 / (this x its trained tokens) (VAPO: "
        "0.05)",
    )
    targets: Literal["gae", "vtrace"] = Field(
        "gae",
        description="advantages and the critic's targets: those of GAE, or V-trace's, which correct for the "
        "policy that sampled",
    )
    vtrace_rho_cap: PositiveFloat = Field(
        1.0, description="cap of a token's own ratio old/rollout (vtrace)"
    )
    vtrace_c_cap: PositiveFloat = Field(
        1.0,
        description="cap of the ratios over which a correction travels back (vtrace)",
    )
    value_clip: PositiveFloat | None = Field(
        0.2,
        description="how far a value may move in a batch before the critic's loss stops it",
    )

    @model_validator(mode="before")
    @classmethod
    def _follow_the_policy(cls, values: Any) -> Any:
        """Set the lambda of the returns to that of the advantages by default."""
        if isinstance(values, dict) and "gae_lambda" in values:
            return {"returns_lambda": values["gae_lambda"], **values}
        return values


class TeacherConfig(Section):
    """A teacher for the policy: with this table the objective is distillation. The
    trainer computes it, or a server does."""

    model_path: Text | None = Field(
        None,
        description="folder or checkpoint with the weights of a teacher that the trainer computes, a model "
        "of the same shape",
    )
    url: Text | None = Field(
        None,
        description="http(s) URL of an SGLang server with a teacher of any shape and the same tokens; its "
        "key comes from INVRL_TEACHER_KEY",
    )
    timeout_s: PositiveFloat = Field(
        120.0,
        description="until the teacher at url has scored one sample; it is asked three times",
    )
    concurrency: PositiveInt = Field(
        16, description="samples that the teacher at url scores at the same time"
    )


class DpoConfig(Section):
    """The objective dpo."""

    beta: PositiveFloat = Field(
        0.1, description="how closely the policy holds to the reference"
    )
    label_smoothing: float = Field(
        0.0,
        ge=0.0,
        lt=0.5,
        description="share of pairs whose label is taken to be wrong",
    )


class IpoConfig(Section):
    """The objective ipo."""

    beta: PositiveFloat = Field(
        0.1, description="its tau: how closely the policy holds to the reference"
    )


class SimpoConfig(Section):
    """The objective simpo."""

    beta: PositiveFloat = Field(2.0, description="factor of the rewards per token")
    gamma: NonNegativeFloat = Field(
        0.5,
        description="target margin between chosen and rejected (the authors' code: gamma / beta)",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0.0,
        lt=0.5,
        description="share of pairs whose label is taken to be wrong",
    )


class OrpoConfig(Section):
    """The objective orpo."""

    weight: PositiveFloat = Field(
        0.1, description="weight of the odds-ratio loss beside the NLL (lambda)"
    )


class KtoConfig(Section):
    """The objective kto."""

    beta: PositiveFloat = Field(
        0.1, description="how closely the policy holds to the reference"
    )
    desirable_weight: NonNegativeFloat = Field(
        1.0, description="weight of the loss of desirable samples"
    )
    undesirable_weight: NonNegativeFloat = Field(
        1.0, description="weight of the loss of undesirable samples"
    )


class SapoConfig(Section):
    """The policy loss sapo."""

    temperature_positive: PositiveFloat = Field(
        1.0, description="temperature of the gate where the advantage is positive"
    )
    temperature_negative: PositiveFloat = Field(
        1.05, description="temperature of the gate where it is not"
    )


class RejectionGateConfig(Section):
    """The policy loss rejection_gate."""

    sharpness: PositiveFloat = Field(
        4.0, description="k of the gate sigmoid(k (r - 1)) in the ratio r"
    )


class DppoConfig(Section):
    """The policy losses dppo_tv and dppo_kl."""

    threshold: PositiveFloat = Field(
        0.2,
        description="distance from the policy that sampled above which a token is masked (dppo_tv; the paper "
        "has 0.05 for dppo_kl)",
    )


class VespoConfig(Section):
    """The policy loss vespo, with the sample's weight W^c1 exp(c2 (1 - W))."""

    power_positive: NonNegativeFloat = Field(
        2.0, description="c1, advantage not negative"
    )
    decay_positive: NonNegativeFloat = Field(3.0, description="c2 of the same")
    power_negative: NonNegativeFloat = Field(3.0, description="c1, advantage negative")
    decay_negative: NonNegativeFloat = Field(2.0, description="c2 of the same")


class PluginTables(Section):
    """Settings of user code: a table for each, by the name after its colon."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]] = Field(init=False)  # type: ignore[reportIncompatibleVariableOverride]

    @property
    def by_name(self) -> Mapping[str, Mapping[str, Any]]:
        return self.__pydantic_extra__
