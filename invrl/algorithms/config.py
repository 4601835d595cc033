"""The algorithm's axes as settings, and presets of them by name. A preset is only values of these fields."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from invrl.section import Section

Deviation = Literal["sample", "population"]
"""The standard deviation of a group's rewards: squares divided by G - 1, or by G."""

WhitenedOver = Literal["none", "tokens", "rollouts"]
TOKEN_LEVEL = ("gae",)
"""Advantages that the trainer computes, from the rewards of tokens and a critic's values."""

PRESETS: dict[str, dict[str, str | float]] = {
    # arXiv 2402.03300 (its KL coefficient and its single update per batch: section 4.2)
    "grpo": {"advantage": "grpo", "eps_clip_low": 0.2, "eps_clip_high": 0.2, "kl_coef": 0.04},
    # arXiv 2503.20783
    "dr_grpo": {"advantage": "dr_grpo", "eps_clip_low": 0.2, "eps_clip_high": 0.2, "kl_coef": 0.0},
    # arXiv 2503.14476. Its clip-higher needs several mini-batches; the paper makes 16 of 512 prompts.
    "dapo": {
        "advantage": "grpo",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.28,
        "kl_coef": 0.0,
        "num_minibatches": 4,
    },
}
"""Presets set only axes that exist. A paper's own aggregation that is not built yet (GRPO's mean per rollout,
Dr. GRPO's constant) is replaced by token_mean (DAPO's). DAPO's dynamic sampling is the buffer's filter
`nonzero_variance`."""


class AlgorithmConfig(Section):
    """The axes: advantage x ratio level x surrogate x off-policy correction x aggregation x KL."""

    objective: str = Field(
        "rl", description="what a step minimizes: 'rl' (these axes), or module:name of an Objective"
    )
    algorithm_preset: Literal["", "grpo", "dr_grpo", "dapo"] = Field(
        "", description="a preset of these fields by name; a field that is given takes precedence"
    )
    advantage: str = Field(
        "grpo",
        description="'grpo', 'dr_grpo', 'gae' (PPO with a critic), or module:name of an AdvantageFn",
    )
    advantage_eps: PositiveFloat = Field(1e-4, description="added to the group's reward deviation (grpo)")
    reward_deviation: Deviation = Field(
        "sample", description="the group's reward deviation (grpo): divided by G - 1, or by G (population)"
    )
    advantage_whitening: WhitenedOver = Field(
        "none",
        description="advantages are shifted and scaled to mean 0 and deviation 1 over the batch, where each "
        "token counts once, or each rollout; gae does it over tokens anyway",
    )
    discount: float = Field(1.0, ge=0.0, le=1.0, description="factor of a reward per trained token (gae)")
    gae_lambda: float = Field(
        0.95, ge=0.0, le=1.0, description="how far the policy's advantage looks ahead (gae): 0: one token"
    )
    critic_gae_lambda: float = Field(
        0.95,
        ge=0.0,
        le=1.0,
        description="lambda of the returns that the critic learns (gae); where it is left out: gae_lambda",
    )
    gae_length_alpha: NonNegativeFloat = Field(
        0.0,
        description="in the place of gae_lambda each row has 1 - 1 / (this x its trained tokens) (VAPO: "
        "0.05); 0: gae_lambda",
    )
    value_targets: Literal["gae", "vtrace"] = Field(
        "gae",
        description="advantages and the critic's targets (gae): those of GAE, or V-trace's, which correct "
        "for the policy that sampled",
    )
    vtrace_rho_cap: PositiveFloat = Field(1.0, description="cap of a token's own ratio old/rollout (vtrace)")
    vtrace_c_cap: PositiveFloat = Field(
        1.0, description="cap of the ratios over which a correction travels back (vtrace)"
    )
    value_clip: NonNegativeFloat = Field(
        0.2,
        description="how far a value may move in a batch before the critic's loss stops it (gae); 0: no "
        "bound",
    )
    kl_reward_coef: NonNegativeFloat = Field(
        0.0,
        description="weight of the log-ratio to a frozen reference that each token's reward loses (gae); 0: "
        "none",
    )
    policy_loss: str = Field("clip", description="surrogate: 'clip', or module:name of a PolicyLoss")
    ratio_level: Literal["token"] = Field("token", description="level at which current/old ratios are taken")
    eps_clip_low: PositiveFloat = Field(0.2, description="lower clip bound: ratio >= 1 - this")
    eps_clip_high: PositiveFloat = Field(0.2, description="upper clip bound: ratio <= 1 + this")
    dual_clip: NonNegativeFloat = Field(
        3.0, description="bound of the ratio where the advantage is negative (clip): above 1, or 0 for none"
    )
    correction: Literal["none", "truncated"] = Field(
        "truncated", description="off-policy correction on old/rollout (truncated importance sampling)"
    )
    correction_cap: PositiveFloat = Field(2.0, description="cap of the truncated importance weight")
    aggregation: Literal["token_mean", "sequence_mean", "rollout_mean", "group_mean", "constant"] = Field(
        "token_mean",
        description="how token losses become one number: the mean over all tokens; over rows, rollouts or "
        "groups of each one's own mean; or each rollout's sum over aggregation_constant",
    )
    aggregation_constant: NonNegativeFloat = Field(
        0.0, description="tokens that a rollout's sum is divided by (aggregation constant)"
    )
    kl_coef: NonNegativeFloat = Field(0.0, description="weight of the k3 KL to a frozen reference; 0: none")
    kl_clamp: NonNegativeFloat = Field(
        10.0, description="upper bound of one token's k3 in the loss; 0: no bound"
    )
    old_logprobs: Literal["recompute", "engine"] = Field(
        "recompute",
        description="old policy: recomputed when the batch is taken; or the engine's (no correction acts)",
    )
    num_minibatches: PositiveInt = Field(
        1,
        description="optimizer steps (mini-batches) per batch; with 1 and recomputed old no ratio is clipped",
    )

    @property
    def current_is_old(self) -> bool:
        """Whether the current policy of every optimizer step is the old one, so that nothing is computed for
        old."""
        return self.num_minibatches == 1 and self.old_logprobs == "recompute"

    @property
    def whitened_over(self) -> WhitenedOver:
        """GAE's advantages are whitened over tokens if nothing else is set, as in TRL and verl."""
        if self.token_level and self.advantage_whitening == "none":
            return "tokens"
        return self.advantage_whitening

    @property
    def token_level(self) -> bool:
        """Whether the trainer computes the advantages."""
        return self.advantage in TOKEN_LEVEL

    def without_effect(self) -> list[str]:
        """One sentence for each setting that cannot act together with the rest of these settings."""
        sentences: list[str] = []
        if self.current_is_old and self.policy_loss == "clip":
            sentences.append(
                "the clip (eps_clip_low, eps_clip_high, dual_clip) never acts: in the one optimizer step of "
                "a batch the current policy is the old one, so every ratio is 1. It acts with "
                "--num-minibatches 2 or more, or with --old-logprobs engine"
            )
        if self.old_logprobs == "engine" and self.correction != "none":
            sentences.append(
                f"the {self.correction} correction never acts: with --old-logprobs engine the old policy is "
                "the one that sampled, so every weight is 1, and only the clip bounds how far apart they are"
            )
        return sentences

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: dict[str, object]) -> dict[str, object]:
        """Puts the preset's values below those that were given. The critic's lambda follows the policy's."""
        preset = PRESETS.get(str(values.get("algorithm_preset")), {})
        values = {**preset, **values}
        if "gae_lambda" in values:
            values.setdefault("critic_gae_lambda", values["gae_lambda"])
        return values
