"""The algorithm's axes as settings. Presets of them by name are in `presets.py`."""

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from invrl.algorithms.presets import PRESETS, PresetName
from invrl.section import COMMA_SEPARATED, Section

Deviation = Literal["sample", "population"]
"""The standard deviation of a group's rewards: squares divided by G - 1, or by G."""
WhitenedOver = Literal["none", "tokens", "rollouts"]
RolloutUse = Literal["train", "baseline", "leave_out"]
"""A rollout is trained; or only its reward counts, in the baseline of the others; or
neither."""
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
"""Advantages that are linear in the rewards of a group: that of a sum of rewards is the
sum of theirs."""
FROM_VALUES = ("gae",)
"""Advantages that the trainer computes, from the rewards of tokens and a critic's
values."""
WHITENED = ("reinforce_pp", "reinforce_pp_baseline", *FROM_VALUES)
"""Advantages that are whitened over tokens if nothing else is set."""


class AlgorithmConfig(Section):
    """The axes: advantage x ratio level x surrogate x off-policy correction x
    aggregation x KL."""

    objective: str = Field(
        "rl",
        description="what a step minimizes: 'rl' (these axes); 'distillation' (these axes, towards a "
        "teacher); on given rows 'sft', 'dpo', 'ipo', 'orpo', 'simpo', 'kto'; or module:name of an Objective",
    )
    preference_beta: PositiveFloat = Field(
        0.1,
        description="how closely dpo, ipo (its tau) and kto hold to the reference",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0.0,
        lt=0.5,
        description="share of pairs whose label is taken to be wrong (dpo, simpo)",
    )
    simpo_beta: PositiveFloat = Field(
        2.0, description="factor of simpo's rewards per token"
    )
    simpo_gamma: NonNegativeFloat = Field(
        0.5,
        description="simpo's target margin between chosen and rejected (the authors' code: gamma / beta)",
    )
    orpo_lambda: PositiveFloat = Field(
        0.1, description="weight of orpo's odds-ratio loss beside its NLL"
    )
    kto_desirable_weight: NonNegativeFloat = Field(
        1.0, description="weight of the loss of desirable rows (kto)"
    )
    kto_undesirable_weight: NonNegativeFloat = Field(
        1.0, description="weight of the loss of undesirable rows (kto)"
    )
    algorithm_preset: PresetName = Field(
        "",
        description="a preset of these fields by name; a field that is given takes precedence",
    )
    advantage: str = Field(
        "grpo",
        description="'grpo', 'dr_grpo', 'rloo', 'maxrl', 'pass_at_k', 'raw' (the reward itself), 'reinforce' "
        "(less the batch's mean), 'reinforce_pp', 'reinforce_pp_baseline', 'gae' (PPO with a critic), or "
        "module:name of an AdvantageFn",
    )
    advantage_eps: PositiveFloat = Field(
        1e-4,
        description="added to the deviation that the advantage is divided by (grpo, pass_at_k)",
    )
    reward_deviation: Deviation = Field(
        "sample",
        description="the group's reward deviation (grpo): divided by G - 1, or by G (population)",
    )
    advantage_std_floor: NonNegativeFloat = Field(
        0.0,
        description="smallest deviation that an advantage is divided by (grpo, pass_at_k, whitening)",
    )
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
        description="factor of a reward per turn that lies between (turn_reward_use add), or per trained "
        "token (gae)",
    )
    overlong_buffer: NonNegativeInt = Field(
        0,
        description="last tokens of overlong_length over which a growing penalty is subtracted from the "
        "final reward (DAPO); 0: none",
    )
    overlong_penalty: NonNegativeFloat = Field(
        1.0,
        description="largest penalty of an overlong rollout (needs overlong_buffer)",
    )
    overlong_length: NonNegativeInt = Field(
        0,
        description="tokens that all turns of a rollout may sample (overlong_buffer); 0: max_new_tokens",
    )
    length_penalty: NonNegativeFloat = Field(
        0.0,
        description="weight of a reward within ±0.5 for being shorter than the rest of the group (Kimi k1.5)",
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
    reward_columns: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field(
        (),
        description="columns of tokens that are added to the rewards of tokens (gae)",
    )
    gae_lambda: float = Field(
        0.95,
        ge=0.0,
        le=1.0,
        description="how far the policy's advantage looks ahead (gae): 0: one token",
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
    vtrace_rho_cap: PositiveFloat = Field(
        1.0, description="cap of a token's own ratio old/rollout (vtrace)"
    )
    vtrace_c_cap: PositiveFloat = Field(
        1.0,
        description="cap of the ratios over which a correction travels back (vtrace)",
    )
    value_clip: NonNegativeFloat = Field(
        0.2,
        description="how far a value may move in a batch before the critic's loss stops it (gae); 0: no "
        "bound",
    )
    policy_loss: str = Field(
        "clip",
        description="surrogate: 'clip' (PPO), 'cispo', 'sapo', 'rejection_gate', 'gmpo', 'dppo_tv', "
        "'dppo_kl', 'vespo', 'policy_gradient' (no ratio); with --rollout-top-logprobs 'dppo_tv_topk', "
        "'dppo_kl_topk', 'simko'; or module:name of a PolicyLoss",
    )
    ratio_level: Literal["token", "sequence", "sequence_token"] = Field(
        "token",
        description="level at which current/old ratios are taken: the token; the row, as the mean of its "
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
    dual_clip: NonNegativeFloat = Field(
        3.0,
        description="bound of the ratio where the advantage is negative (clip): above 1, or 0 for none",
    )
    sapo_temperature_positive: PositiveFloat = Field(
        1.0,
        description="temperature of the gate where the advantage is positive (sapo)",
    )
    sapo_temperature_negative: PositiveFloat = Field(
        1.05, description="temperature of the gate where it is not (sapo)"
    )
    rejection_gate_sharpness: PositiveFloat = Field(
        4.0,
        description="k of the gate sigmoid(k (r - 1)) in the ratio r (rejection_gate)",
    )
    dppo_threshold: PositiveFloat = Field(
        0.2,
        description="distance from the policy that sampled above which a token is masked (dppo_tv; the paper "
        "has 0.05 for dppo_kl)",
    )
    simko_alpha: float = Field(
        0.01,
        ge=0.0,
        le=1.0,
        description="share of a token's gradient that the likeliest tokens get (simko)",
    )
    simko_top1_weight: PositiveFloat = Field(
        1.1,
        description="factor of the ratio of a likeliest token whose advantage is negative (simko)",
    )
    simko_entropy_quantile: float = Field(
        0.8,
        ge=0.0,
        le=1.0,
        description="quantile of a row's entropies above which tokens are changed (simko)",
    )
    vespo_power_positive: NonNegativeFloat = Field(
        2.0,
        description="c1 of the row's weight W^c1 exp(c2 (1 - W)), advantage not negative (vespo)",
    )
    vespo_decay_positive: NonNegativeFloat = Field(
        3.0, description="c2 of the same (vespo)"
    )
    vespo_power_negative: NonNegativeFloat = Field(
        3.0, description="c1, advantage negative (vespo)"
    )
    vespo_decay_negative: NonNegativeFloat = Field(
        2.0, description="c2, advantage negative (vespo)"
    )
    correction: Literal[
        "none", "truncated", "sequence_truncated", "geometric_truncated"
    ] = Field(
        "truncated",
        description="off-policy correction on old/rollout, an importance weight between correction_floor and "
        "correction_cap: the token's, its row's (product of the tokens'), or the row's geometric mean",
    )
    correction_cap: PositiveFloat = Field(
        2.0, description="cap of the truncated importance weight"
    )
    correction_floor: NonNegativeFloat = Field(
        0.0, description="lower bound of the same; 0: none"
    )
    rejection: Literal["none", "token", "sequence", "geometric"] = Field(
        "none",
        description="which tokens are left out of the policy's gradient: those whose old/rollout ratio (of "
        "the token; of its row, as product or geometric mean) is outside of rejection_low and rejection_high",
    )
    rejection_low: NonNegativeFloat = Field(
        0.0, description="lowest ratio that is kept; 0: no bound"
    )
    rejection_high: NonNegativeFloat = Field(
        0.0, description="highest ratio that is kept; 0: no bound"
    )
    router_shift_floor: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="smallest factor of a token's current/old ratio for experts whose routers have moved "
        "since the old policy (RSPO: 0.8); 0: no such factor",
    )
    aggregation: Literal[
        "token_mean", "sequence_mean", "rollout_mean", "group_mean", "constant"
    ] = Field(
        "token_mean",
        description="how token losses become one number: the mean over all tokens; over rows, rollouts or "
        "groups of each one's own mean; or each rollout's sum over aggregation_constant",
    )
    aggregation_constant: NonNegativeFloat = Field(
        0.0,
        description="tokens that a rollout's sum is divided by (aggregation constant)",
    )
    length_weighting: Literal["none", "power"] = Field(
        "none",
        description="factor of the losses of a rollout's tokens by its length within its group; power: a "
        "softmax of (1 + r z)^lambda with the standardized length z, times the group's size (lambda-GRPO)",
    )
    length_lambda: float = Field(
        0.0,
        ge=-100.0,
        le=100.0,
        description="lambda at the start (length_weighting power): above 0 long rollouts count more, below 0 "
        "short ones; 0: all alike. The paper does not say where it starts",
    )
    length_lambda_lr: NonNegativeFloat = Field(
        0.0,
        description="learning rate of lambda, by gradient descent in each optimizer step; 0: it stays. The "
        "paper does not give one",
    )
    length_lambda_scale: PositiveFloat = Field(
        1 / 9, description="r, how far a deviation of the length moves 1 + r z from 1"
    )
    kl_coef: NonNegativeFloat = Field(
        0.0, description="weight of the KL to a frozen reference; 0: none"
    )
    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = Field(
        "k3",
        description="estimator of that KL; unbiased: k3 with an importance weight (DeepSeek-V3.2)",
    )
    kl_in: Literal["loss", "reward", "rollout_reward"] = Field(
        "loss",
        description="where the KL is: a term of the loss; a penalty of each token's reward (k1 is usual); or "
        "the whole rollout's, in its reward before rewards are compared (rloo, dr_grpo, raw)",
    )
    kl_clamp: NonNegativeFloat = Field(
        10.0, description="bound of one token's estimate of that KL; 0: no bound"
    )
    kl_target: NonNegativeFloat = Field(
        0.0,
        description="KL to the reference, in nats per token, towards which kl_coef is adapted after each "
        "batch; 0: kl_coef stays",
    )
    reference_reset_steps: NonNegativeInt = Field(
        0,
        description="batches after which the current policy becomes the reference, again and again; 0: never",
    )
    reference_reset_optimizer: bool = Field(
        False,
        description="the optimizer's moments are reset whenever the reference is (ProRL)",
    )
    reference_ema: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="the reference is a moving average: after each batch this share of it stays and the rest "
        "is the current policy; 0: it stays frozen",
    )
    solved_nll_coef: NonNegativeFloat = Field(
        0.0,
        description="weight of the negative log-likelihood of rollouts that solved their task (reward of at "
        "least success_reward), a mean over their tokens (VAPO: 0.1); 0: none",
    )
    entropy_coef: NonNegativeFloat = Field(
        0.0,
        description="weight of the entropy bonus: it is subtracted from the loss; 0: none",
    )
    entropy_target: NonNegativeFloat = Field(
        0.0,
        description="entropy in nats above which there is no bonus, and towards which entropy_coef is "
        "adapted after each batch; 0: entropy_coef stays",
    )
    entropy_ceiling: NonNegativeFloat = Field(
        0.0,
        description="entropy in nats above which entropy_coef becomes a penalty; between entropy_target and "
        "this nothing acts; 0: none",
    )
    entropy_coef_step: PositiveFloat = Field(
        0.005,
        description="by how much a batch changes entropy_coef (entropy_target, entropy_ceiling)",
    )
    old_logprobs: Literal["recompute", "engine", "interpolated"] = Field(
        "recompute",
        description="old policy: recomputed when the batch is taken; the engine's (no correction acts); or "
        "between the engine's and the current one by the token's staleness, with no pass for it (A-3PO)",
    )
    num_minibatches: PositiveInt = Field(
        1,
        description="optimizer steps (mini-batches) per batch; with 1 and recomputed old no ratio is clipped",
    )

    @property
    def kl_in_rollout_rewards(self) -> bool:
        """Whether the KL of whole rollouts enters the rewards that are compared."""
        return self.kl_in == "rollout_reward" and self.kl_coef > 0

    @property
    def reference_moves(self) -> bool:
        """Whether the reference's weights change in the run."""
        return bool(self.reference_reset_steps or self.reference_ema)

    @property
    def current_is_old(self) -> bool:
        """Whether the current policy of every optimizer step is the old one, so that
        nothing is computed for old."""
        return self.num_minibatches == 1 and self.old_logprobs == "recompute"

    @property
    def whitened_over(self) -> WhitenedOver:
        """REINFORCE++ and GAE (as in TRL and verl) are whitened over tokens if nothing
        else is set."""
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
        is_added = self.kl_in == "reward" and self.kl_coef > 0
        return is_added and (self.has_critic or self.advantage == "reinforce_pp")

    @property
    def token_level(self) -> bool:
        """Whether the trainer computes the advantages: from values, or because the KL
        is in the rewards that are whitened (REINFORCE++)."""
        return self.has_critic or self.kl_in_token_rewards

    def without_effect(self) -> list[str]:
        """One sentence for each setting that cannot act together with the rest of these
        settings."""
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
                "--num-minibatches 2 or more, or with --old-logprobs engine"
            )
        if self.old_logprobs == "engine" and self.correction != "none":
            sentences.append(
                f"the {self.correction} correction never acts: with --old-logprobs engine the old policy is "
                "the one that sampled, so every weight is 1, and only the clip bounds how far apart they are"
            )
        if self.old_logprobs == "engine" and self.rejection != "none":
            sentences.append(
                f"the {self.rejection} rejection never acts: with --old-logprobs engine the old policy is "
                "the one that sampled, so no ratio is outside of any bounds"
            )
        if (
            self.length_weighting != "none"
            and not self.length_lambda
            and not self.length_lambda_lr
        ):
            sentences.append(
                "the length weights never act: with a length_lambda of 0 that is not learned every weight is "
                "1. They act with --length-lambda, or with --length-lambda-lr"
            )
        if self.kl_in != "loss" and not self.kl_coef:
            sentences.append(
                "kl_in has no effect: kl_coef is 0, so there is no KL term"
            )
        return sentences

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: dict[str, object]) -> dict[str, object]:
        """Puts the preset's values below those that were given. The critic's lambda
        follows the policy's."""
        preset = PRESETS.get(str(values.get("algorithm_preset")), {})
        values = {**preset, **values}
        if "gae_lambda" in values:
            values.setdefault("critic_gae_lambda", values["gae_lambda"])
        return values
