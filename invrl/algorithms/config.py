"""Settings of the algorithm's axes. Their tables are in `tables.py`, presets of them in
`presets.py`."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from invrl.algorithms.presets import PRESETS, PresetName
from invrl.algorithms.tables import (
    AdvantageStdConfig,
    CriticConfig,
    DpoConfig,
    DppoConfig,
    EntropyConfig,
    IpoConfig,
    KlConfig,
    KtoConfig,
    OrpoConfig,
    OverlongConfig,
    PluginTables,
    ReferenceConfig,
    RejectionConfig,
    RejectionGateConfig,
    SapoConfig,
    SimpoConfig,
    TeacherConfig,
    VespoConfig,
)
from invrl.types.section import (
    COMMA_SEPARATED,
    Choice,
    Section,
    Text,
    merged,
    with_choices,
)
from invrl.user_code.plugins import plugin_name

WhitenedOver = Literal["none", "tokens", "rollouts"]
RolloutUse = Literal["train", "baseline", "leave_out"]
"""Use of a rollout: it is trained, only its reward counts in the baseline of the
others, or neither."""
DEFAULT_PASS_AT_K = 4
GROUP_RELATIVE = (
    "grpo",
    "dr_grpo",
    "rloo",
    "maxrl",
    "pass_at_k",
    "reinforce_pp_baseline",
)
"""Advantages that are 0 in a group of one."""
LINEAR = ("rloo", "dr_grpo", "raw")
"""Advantages that are linear in the rewards of a group: the advantage of a sum is the
sum of the advantages."""
FROM_VALUES = ("gae",)
"""Advantages that the trainer computes from token rewards and a critic's values."""
WHITENED = ("reinforce_pp", "reinforce_pp_baseline", *FROM_VALUES)
"""Advantages that are whitened over tokens by default."""


class AlgorithmConfig(Section):
    """The axes: advantage x ratio level x policy loss x off-policy correction x
    aggregation x KL. Optional ones are separate tables."""

    chosen_by: ClassVar[Mapping[str, Choice]] = {
        "dpo": Choice("objective", ("dpo",)),
        "ipo": Choice("objective", ("ipo",)),
        "simpo": Choice("objective", ("simpo",)),
        "orpo": Choice("objective", ("orpo",)),
        "kto": Choice("objective", ("kto",)),
        "sapo": Choice("policy_loss", ("sapo",)),
        "rejection_gate": Choice("policy_loss", ("rejection_gate",)),
        "dppo": Choice("policy_loss", ("dppo_tv", "dppo_kl")),
        "vespo": Choice("policy_loss", ("vespo",)),
        "critic": Choice("advantage", FROM_VALUES),
    }
    objective: str = Field(
        "rl",
        description="what a step minimizes: 'rl' (these axes); 'distillation' (these axes, towards a "
        "teacher); on given samples 'sft', 'dpo', 'ipo', 'orpo', 'simpo', 'kto'; or module:name of an Objective",
    )
    teacher: TeacherConfig | None = Field(
        None, description="a teacher; the objective is then distillation"
    )
    dpo: DpoConfig | None = None
    ipo: IpoConfig | None = None
    simpo: SimpoConfig | None = None
    orpo: OrpoConfig | None = None
    kto: KtoConfig | None = None
    algorithm_preset: PresetName | None = Field(
        None,
        description="a preset of these fields by name; a field that is given takes precedence",
    )
    advantage: str = Field(
        "grpo",
        description="'grpo', 'dr_grpo', 'rloo', 'maxrl', 'pass_at_k', 'raw' (the reward itself), 'reinforce' "
        "(less the batch's mean), 'reinforce_pp', 'reinforce_pp_baseline', 'gae' (PPO with a critic), or "
        "module:name of an AdvantageFn",
    )
    advantage_std: AdvantageStdConfig = AdvantageStdConfig.model_validate({})
    pass_at_k: PositiveInt = Field(
        DEFAULT_PASS_AT_K,
        description="rollouts of which the best one counts (advantage pass_at_k)",
    )
    advantage_whitening: WhitenedOver = Field(
        "none",
        description="advantages are shifted and scaled to mean 0 and deviation 1 over the batch, where each "
        "token counts once, or each rollout; reinforce_pp, its baseline form and gae do it over tokens "
        "anyway",
    )
    discount: float = Field(
        1.0,
        ge=0.0,
        le=1.0,
        description="factor of a reward per turn that lies between (turn_rewards.use add), or per trained "
        "token (gae)",
    )
    length_penalty: NonNegativeFloat = Field(
        0.0,
        description="weight of a reward within ±0.5 for being shorter than the rest of the group (Kimi k1.5)",
    )
    overlong: OverlongConfig | None = Field(
        None, description="a penalty for rollouts that come near a length"
    )
    failed_rollouts: RolloutUse = Field(
        "train",
        description="failed rollouts that count with a reward are trained; or count in the baseline only; or "
        "are left out",
    )
    truncated_rollouts: RolloutUse = Field(
        "train",
        description="as failed_rollouts, for rollouts in which a turn ran out of tokens (DAPO: baseline)",
    )
    critic: CriticConfig | None = None
    reward_columns: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field(
        (),
        description="columns of tokens that are added to the rewards of tokens (gae)",
    )
    policy_loss: str = Field(
        "clip",
        description="policy loss: 'clip' (PPO), 'cispo', 'sapo', 'rejection_gate', 'gmpo', 'dppo_tv', "
        "'dppo_kl', 'vespo', 'policy_gradient' (no ratio); or module:name of a PolicyLoss",
    )
    ratio_level: Literal["token", "sequence", "sequence_token"] = Field(
        "token",
        description="level at which current/old ratios are taken: the token; the sample, as the mean of its "
        "log-ratios (GSPO); the same with a gradient per token (GSPO-token)",
    )
    eps_clip_low: PositiveFloat = Field(
        0.2,
        description="lower clip bound: ratio >= 1 - this (clip, cispo), or e^-this (gmpo)",
    )
    eps_clip_high: PositiveFloat = Field(
        0.2,
        description="upper clip bound: ratio <= 1 + this (clip, cispo), or e^this (gmpo)",
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        3.0,
        description="bound of the ratio where the advantage is negative (clip)",
    )
    sapo: SapoConfig | None = None
    rejection_gate: RejectionGateConfig | None = None
    dppo: DppoConfig | None = None
    vespo: VespoConfig | None = None
    correction: Literal[
        "none", "truncated", "sequence_truncated", "geometric_truncated"
    ] = Field(
        "truncated",
        description="off-policy correction on old/rollout, an importance weight between correction_floor and "
        "correction_cap: the token's, its sample's (product of the tokens'), or the sample's geometric mean",
    )
    correction_cap: PositiveFloat = Field(
        2.0, description="cap of the truncated importance weight"
    )
    correction_floor: PositiveFloat | None = Field(
        None, description="lower bound of the same"
    )
    rejection: RejectionConfig | None = Field(
        None, description="which tokens are left out of the policy's gradient"
    )
    ratio_weight: Text | None = Field(
        None,
        description="a factor of each token's ratio current/old: module:name of a RatioWeight",
    )
    aggregation: Literal[
        "token_mean", "sequence_mean", "rollout_mean", "group_mean", "constant"
    ] = Field(
        "token_mean",
        description="how token losses become one number: the mean over all tokens; over samples, rollouts or "
        "groups of each one's own mean; or each rollout's sum over aggregation_constant",
    )
    aggregation_constant: PositiveFloat | None = Field(
        None,
        description="tokens that a rollout's sum is divided by (aggregation constant)",
    )
    kl: KlConfig | None = Field(
        None, description="a KL to a frozen reference, in the loss or in the rewards"
    )
    reference: ReferenceConfig = ReferenceConfig.model_validate({})
    sample_weight: Text | None = Field(
        None,
        description="a factor of the token losses of each sample: module:name of a SampleWeight",
    )
    solved_nll_coef: PositiveFloat | None = Field(
        None,
        description="weight of the negative log-likelihood of rollouts that solved their task (reward of at "
        "least success_reward), a mean over their tokens (VAPO: 0.1)",
    )
    entropy: EntropyConfig | None = Field(None, description="an entropy bonus")
    old_logprobs: str = Field(
        "recompute",
        description="old policy: 'recompute', when the batch is taken; 'engine', the policy that sampled (no "
        "correction acts); or module:name of an OldPolicy",
    )
    adaptations: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field(
        (),
        description="what changes these settings during the run: module:name of each Adaptation",
    )
    plugin: PluginTables = PluginTables.model_validate({})
    num_mini_batches: PositiveInt = Field(
        1,
        description="optimizer steps (mini-batches) per batch; with 1 and recomputed old no ratio is clipped",
    )

    def with_plugin_table(
        self, name: str, changes: Mapping[str, object]
    ) -> "AlgorithmConfig":
        """Return the settings with changes in the table of this user code."""
        table = {**self.plugin.by_name.get(name, {}), **changes}
        plugin = self.plugin.model_copy(update={name: table})
        return self.model_copy(update={"plugin": plugin})

    @property
    def kl_in_rollout_rewards(self) -> bool:
        """Whether the KL of whole rollouts enters the rewards that are compared."""
        return self.kl is not None and self.kl.added_to == "rollout_reward"

    @property
    def reference_moves(self) -> bool:
        """Whether the reference's weights change in the run."""
        return bool(self.reference.reset_steps or self.reference.ema)

    @property
    def current_is_old(self) -> bool:
        """Whether current and old policy are equal in every optimizer step, so that
        nothing is computed for old."""
        return self.num_mini_batches == 1 and self.old_logprobs == "recompute"

    @property
    def whitened_over(self) -> WhitenedOver:
        """Axis of the whitening. REINFORCE++ and GAE (as in TRL and verl) are whitened
        over tokens by default."""
        if self.advantage in WHITENED and self.advantage_whitening == "none":
            return "tokens"
        return self.advantage_whitening

    @property
    def has_critic(self) -> bool:
        """Whether the advantages are computed from the values of a critic."""
        return self.advantage in FROM_VALUES

    @property
    def kl_in_token_rewards(self) -> bool:
        """Whether the KL enters the rewards from which the trainer computes
        advantages."""
        is_added = self.kl is not None and self.kl.added_to == "reward"
        return is_added and (self.has_critic or self.advantage == "reinforce_pp")

    @property
    def token_level(self) -> bool:
        """Whether the trainer computes the advantages: from values, or because the KL
        is in the rewards that are whitened (REINFORCE++)."""
        return self.has_critic or self.kl_in_token_rewards

    def without_effect(self) -> list[str]:
        """Return one sentence for each setting that has no effect with the rest of
        these settings."""
        sentences: list[str] = []
        if self.objective not in ("rl", "distillation"):
            return sentences
        if self.current_is_old and self.policy_loss in ("clip", "cispo", "gmpo"):
            settings = "eps_clip_low, eps_clip_high"
            if self.policy_loss == "clip":
                settings += ", dual_clip"
            sentences.append(
                f"the clip ({settings}) never acts: in the one optimizer step of "
                "a batch the current policy is the old one, so every ratio is 1. It acts with "
                "--num-mini-batches 2 or more, or with --old-logprobs engine"
            )
        if self.old_logprobs == "engine" and self.correction != "none":
            sentences.append(
                f"the {self.correction} correction never acts: with --old-logprobs engine the old policy is "
                "the one that sampled, so every weight is 1, and only the clip bounds how far apart they are"
            )
        if self.old_logprobs == "engine" and self.rejection is not None:
            sentences.append(
                f"the {self.rejection.kind} rejection never acts: with --old-logprobs engine the old policy is "
                "the one that sampled, so no ratio is outside of any bounds"
            )
        return sentences

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        """Put the preset's values below the given ones, the choice next to its table,
        and the table next to the choice that reads it."""
        if not isinstance(values, dict):
            return values
        given = set(values)
        values = over_preset(values)
        if values.get("teacher", False) not in (None, False):
            values.setdefault("objective", "distillation")
        return with_choices(cls, values, given)


def over_preset(values: Mapping[str, object]) -> dict[str, object]:
    """Merge the settings of [algorithm] over those of the preset that they name."""
    preset = PRESETS.get(str(values.get("algorithm_preset")), {})
    over = {**preset, **values}
    for name, below in preset.items():
        above = values.get(name)
        if isinstance(below, Mapping) and isinstance(above, Mapping):
            over[name] = merged(below, above)
    tables = over.get("plugin")
    if isinstance(tables, Mapping):
        # A table of the preset goes with the code that it is for.
        given = values.get("plugin")
        kept = set(_plugin_names(over))
        if isinstance(given, Mapping):
            kept.update(given)
        over["plugin"] = {name: tables[name] for name in tables if name in kept}
    return over


def _plugin_names(values: Mapping[str, object]) -> Iterator[str]:
    """Yield the names of the user code that the settings name."""
    for value in values.values():
        paths = value.split(",") if isinstance(value, str) else value
        if isinstance(paths, list | tuple):
            for path in paths:
                yield plugin_name(str(path).strip())
