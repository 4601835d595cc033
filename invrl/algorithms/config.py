"""The algorithm's axes as settings, and presets of them by name. A preset is only values of these fields."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from invrl.section import COMMA_SEPARATED, Section

Deviation = Literal["sample", "population"]
"""The standard deviation of a group's rewards: squares divided by G - 1, or by G."""
WhitenedOver = Literal["none", "tokens", "rollouts"]
RolloutUse = Literal["train", "baseline", "leave_out"]
"""A rollout is trained; or only its reward counts, in the baseline of the others; or neither."""
DEFAULT_PASS_AT_K = 4
GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo", "maxrl", "pass_at_k", "reinforce_pp_baseline")
"""Advantages that are 0 in a group of one."""
LINEAR = ("rloo", "dr_grpo", "raw")
"""Advantages that are linear in the rewards of a group: that of a sum of rewards is the sum of theirs."""
FROM_VALUES = ("gae",)
"""Advantages that the trainer computes, from the rewards of tokens and a critic's values."""
WHITENED = ("reinforce_pp", "reinforce_pp_baseline", *FROM_VALUES)
"""Advantages that are whitened over tokens if nothing else is set."""

PRESETS: dict[str, dict[str, str | float | bool]] = {
    # arXiv 2402.03300: eq. 3, and section 4.2 for the KL coefficient and the single update per batch
    "grpo": {
        "advantage": "grpo",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "dual_clip": 0.0,
        "aggregation": "rollout_mean",
        "kl_coef": 0.04,
    },
    # arXiv 2503.20783. The constant is the paper's budget of tokens (appendix G).
    "dr_grpo": {
        "advantage": "dr_grpo",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "dual_clip": 0.0,
        "aggregation": "constant",
        "aggregation_constant": 3000.0,
        "kl_coef": 0.0,
    },
    # arXiv 2503.14476, section 4.1. Its clip-higher needs several mini-batches; the paper makes 16 of 512
    # prompts. Equation 12 takes the mean over the tokens of one prompt's rollouts; the released code takes it
    # over all tokens of a mini-batch, and so does this.
    "dapo": {
        "advantage": "grpo",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.28,
        "dual_clip": 0.0,
        "aggregation": "token_mean",
        "kl_coef": 0.0,
        "num_minibatches": 4,
    },
    # arXiv 2507.18071, section 5.1
    "gspo": {
        "advantage": "grpo",
        "ratio_level": "sequence",
        "eps_clip_low": 3e-4,
        "eps_clip_high": 4e-4,
        "dual_clip": 0.0,
        "correction": "geometric_truncated",
        "aggregation": "sequence_mean",
        "kl_coef": 0.0,
        "num_minibatches": 4,
    },
    # MiniMax-M1, arXiv 2506.13585, section 3.1. The upper bound is not in the paper: the cap of 5 is
    # ScaleRL's (arXiv 2510.13786). The paper makes 16 updates a batch.
    "cispo": {
        "advantage": "grpo",
        "policy_loss": "cispo",
        "eps_clip_low": 1.0,
        "eps_clip_high": 4.0,
        "aggregation": "token_mean",
        "kl_coef": 0.0,
        "num_minibatches": 4,
    },
    # arXiv 2402.14740: REINFORCE on whole rollouts, with the KL coefficient of its summarization task and its
    # 2 updates a batch.
    "rloo": {
        "advantage": "rloo",
        "policy_loss": "policy_gradient",
        "aggregation": "constant",
        "aggregation_constant": 1.0,
        "kl_coef": 0.03,
        "kl_estimator": "k1",
        "kl_in": "rollout_reward",
        "kl_clamp": 0.0,
        "num_minibatches": 2,
    },
    # arXiv 2501.03262, eq. 4 and 5, and table 1
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "dual_clip": 0.0,
        "aggregation": "token_mean",
        "kl_coef": 0.01,
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
    # arXiv 1707.06347, with the KL of InstructGPT (arXiv 2203.02155) in the reward; lambda as in both
    "ppo": {
        "advantage": "gae",
        "gae_lambda": 0.95,
        "critic_gae_lambda": 0.95,
        "value_clip": 0.2,
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "dual_clip": 0.0,
        "aggregation": "token_mean",
        "kl_coef": 0.02,
        "kl_estimator": "k1",
        "kl_in": "reward",
        "num_minibatches": 4,
    },
    # arXiv 2504.05118, section 5.1. The paper makes 16 updates a batch.
    "vapo": {
        "advantage": "gae",
        "critic_gae_lambda": 1.0,
        "gae_length_alpha": 0.05,
        "solved_nll_coef": 0.1,
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.28,
        "dual_clip": 0.0,
        "aggregation": "token_mean",
        "kl_coef": 0.0,
        "num_minibatches": 4,
    },
    # arXiv 2511.20347, section 5.1
    "sapo": {
        "advantage": "grpo",
        "policy_loss": "sapo",
        "sapo_temperature_positive": 1.0,
        "sapo_temperature_negative": 1.05,
        "aggregation": "sequence_mean",
        "kl_coef": 0.0,
        "num_minibatches": 4,
    },
    # arXiv 2602.04879, appendix E: binary total variation around the policy that sampled. The paper truncates
    # the ratio at 5, we do not (its section 5.4), and makes 8 updates a batch.
    "dppo": {
        "advantage": "dr_grpo",
        "policy_loss": "dppo_tv",
        "dppo_threshold": 0.2,
        "old_logprobs": "engine",
        "correction": "none",
        "aggregation": "token_mean",
        "kl_coef": 0.0,
        "num_minibatches": 4,
    },
    # arXiv 2602.02710, algorithm 1
    "maxrl": {
        "advantage": "maxrl",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "dual_clip": 0.0,
        "aggregation": "token_mean",
        "kl_coef": 0.0,
    },
    # AReaL, arXiv 2505.24298, table 3. Its code's bound of the weight (5, and the token is left out above
    # it) is not in the paper. The paper's advantage is the reward whitened over the batch.
    "decoupled_ppo": {
        "advantage": "grpo",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "dual_clip": 0.0,
        "old_logprobs": "recompute",
        "correction": "truncated",
        "correction_cap": 5.0,
        "rejection": "token",
        "rejection_high": 5.0,
        "aggregation": "token_mean",
        "kl_coef": 0.0,
        "num_minibatches": 4,
    },
    # arXiv 2512.06547: the same with an interpolated proximal policy
    "a3po": {
        "advantage": "grpo",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "dual_clip": 0.0,
        "old_logprobs": "interpolated",
        "correction": "truncated",
        "correction_cap": 5.0,
        "rejection": "token",
        "rejection_high": 5.0,
        "aggregation": "token_mean",
        "kl_coef": 0.0,
        "num_minibatches": 4,
    },
    # arXiv 2505.24864, sections 2.3 and 3.2. The paper does not report its KL coefficient, and resets the
    # reference and the optimizer when validation stagnates: both numbers are ours.
    "prorl": {
        "advantage": "grpo",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.4,
        "dual_clip": 0.0,
        "aggregation": "token_mean",
        "kl_coef": 0.001,
        "kl_estimator": "k3",
        "reference_reset_steps": 200,
        "reference_reset_optimizer": True,
        "num_minibatches": 4,
    },
    # arXiv 2602.10693, section 4.1. The paper makes 8 updates a batch.
    "vespo": {
        "advantage": "dr_grpo",
        "policy_loss": "vespo",
        "vespo_power_positive": 2.0,
        "vespo_decay_positive": 3.0,
        "vespo_power_negative": 3.0,
        "vespo_decay_negative": 2.0,
        "correction": "none",
        "aggregation": "token_mean",
        "kl_coef": 0.0,
        "num_minibatches": 4,
    },
}
"""Presets set only axes that exist. What all of them leave as it is, whatever their paper has: the truncated
correction between engine and trainer, where a preset names no other (papers that do not know of two policies
have none; with equal log-probs its weights are 1), and where a paper makes more than 4 updates a batch, 4,
because a batch has 4 groups by default. Dynamic sampling (DAPO, CISPO) is the buffer's filter
`nonzero_variance`. Learning rates, batch sizes and sampling are not part of a preset."""

PresetName = Literal[
    "",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "ppo",
    "vapo",
    "sapo",
    "dppo",
    "maxrl",
    "decoupled_ppo",
    "a3po",
    "vespo",
    "prorl",
]


class AlgorithmConfig(Section):
    """The axes: advantage x ratio level x surrogate x off-policy correction x aggregation x KL."""

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
        0.0, ge=0.0, lt=0.5, description="share of pairs whose label is taken to be wrong (dpo, simpo)"
    )
    simpo_beta: PositiveFloat = Field(2.0, description="factor of simpo's rewards per token")
    simpo_gamma: NonNegativeFloat = Field(
        0.5, description="simpo's target margin between chosen and rejected (the authors' code: gamma / beta)"
    )
    orpo_lambda: PositiveFloat = Field(0.1, description="weight of orpo's odds-ratio loss beside its NLL")
    kto_desirable_weight: NonNegativeFloat = Field(
        1.0, description="weight of the loss of desirable rows (kto)"
    )
    kto_undesirable_weight: NonNegativeFloat = Field(
        1.0, description="weight of the loss of undesirable rows (kto)"
    )
    algorithm_preset: PresetName = Field(
        "", description="a preset of these fields by name; a field that is given takes precedence"
    )
    advantage: str = Field(
        "grpo",
        description="'grpo', 'dr_grpo', 'rloo', 'maxrl', 'pass_at_k', 'raw' (the reward itself), 'reinforce' "
        "(less the batch's mean), 'reinforce_pp', 'reinforce_pp_baseline', 'gae' (PPO with a critic), or "
        "module:name of an AdvantageFn",
    )
    advantage_eps: PositiveFloat = Field(
        1e-4, description="added to the deviation that the advantage is divided by (grpo, pass_at_k)"
    )
    reward_deviation: Deviation = Field(
        "sample", description="the group's reward deviation (grpo): divided by G - 1, or by G (population)"
    )
    advantage_std_floor: NonNegativeFloat = Field(
        0.0, description="smallest deviation that an advantage is divided by (grpo, pass_at_k, whitening)"
    )
    pass_at_k: PositiveInt = Field(
        DEFAULT_PASS_AT_K, description="rollouts of which the best one counts (advantage pass_at_k)"
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
        1.0, description="largest penalty of an overlong rollout (needs overlong_buffer)"
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
        (), description="columns of tokens that are added to the rewards of tokens (gae)"
    )
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
    policy_loss: str = Field(
        "clip",
        description="surrogate: 'clip' (PPO), 'cispo', 'sapo', 'rejection_gate', 'dppo_tv', 'dppo_kl', "
        "'vespo', 'policy_gradient' (no ratio); with --rollout-top-logprobs 'dppo_tv_topk', 'dppo_kl_topk', "
        "'simko'; or module:name of a PolicyLoss",
    )
    ratio_level: Literal["token", "sequence", "sequence_token"] = Field(
        "token",
        description="level at which current/old ratios are taken: the token; the row, as the mean of its "
        "log-ratios (GSPO); the same with a gradient per token (GSPO-token)",
    )
    eps_clip_low: PositiveFloat = Field(0.2, description="lower clip bound: ratio >= 1 - this (clip, cispo)")
    eps_clip_high: PositiveFloat = Field(0.2, description="upper clip bound: ratio <= 1 + this (clip, cispo)")
    dual_clip: NonNegativeFloat = Field(
        3.0, description="bound of the ratio where the advantage is negative (clip): above 1, or 0 for none"
    )
    sapo_temperature_positive: PositiveFloat = Field(
        1.0, description="temperature of the gate where the advantage is positive (sapo)"
    )
    sapo_temperature_negative: PositiveFloat = Field(
        1.05, description="temperature of the gate where it is not (sapo)"
    )
    rejection_gate_sharpness: PositiveFloat = Field(
        4.0, description="k of the gate sigmoid(k (r - 1)) in the ratio r (rejection_gate)"
    )
    dppo_threshold: PositiveFloat = Field(
        0.2,
        description="distance from the policy that sampled above which a token is masked (dppo_tv; the paper "
        "has 0.05 for dppo_kl)",
    )
    simko_alpha: float = Field(
        0.01, ge=0.0, le=1.0, description="share of a token's gradient that the likeliest tokens get (simko)"
    )
    simko_top1_weight: PositiveFloat = Field(
        1.1, description="factor of the ratio of a likeliest token whose advantage is negative (simko)"
    )
    simko_entropy_quantile: float = Field(
        0.8,
        ge=0.0,
        le=1.0,
        description="quantile of a row's entropies above which tokens are changed (simko)",
    )
    vespo_power_positive: NonNegativeFloat = Field(
        2.0, description="c1 of the row's weight W^c1 exp(c2 (1 - W)), advantage not negative (vespo)"
    )
    vespo_decay_positive: NonNegativeFloat = Field(3.0, description="c2 of the same (vespo)")
    vespo_power_negative: NonNegativeFloat = Field(3.0, description="c1, advantage negative (vespo)")
    vespo_decay_negative: NonNegativeFloat = Field(2.0, description="c2, advantage negative (vespo)")
    correction: Literal["none", "truncated", "sequence_truncated", "geometric_truncated"] = Field(
        "truncated",
        description="off-policy correction on old/rollout, an importance weight between correction_floor and "
        "correction_cap: the token's, its row's (product of the tokens'), or the row's geometric mean",
    )
    correction_cap: PositiveFloat = Field(2.0, description="cap of the truncated importance weight")
    correction_floor: NonNegativeFloat = Field(0.0, description="lower bound of the same; 0: none")
    rejection: Literal["none", "token", "sequence", "geometric"] = Field(
        "none",
        description="which tokens are left out of the policy's gradient: those whose old/rollout ratio (of "
        "the token; of its row, as product or geometric mean) is outside of rejection_low and rejection_high",
    )
    rejection_low: NonNegativeFloat = Field(0.0, description="lowest ratio that is kept; 0: no bound")
    rejection_high: NonNegativeFloat = Field(0.0, description="highest ratio that is kept; 0: no bound")
    aggregation: Literal["token_mean", "sequence_mean", "rollout_mean", "group_mean", "constant"] = Field(
        "token_mean",
        description="how token losses become one number: the mean over all tokens; over rows, rollouts or "
        "groups of each one's own mean; or each rollout's sum over aggregation_constant",
    )
    aggregation_constant: NonNegativeFloat = Field(
        0.0, description="tokens that a rollout's sum is divided by (aggregation constant)"
    )
    kl_coef: NonNegativeFloat = Field(0.0, description="weight of the KL to a frozen reference; 0: none")
    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = Field(
        "k3", description="estimator of that KL; unbiased: k3 with an importance weight (DeepSeek-V3.2)"
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
        0.0, description="weight of the entropy bonus: it is subtracted from the loss; 0: none"
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
        0.005, description="by how much a batch changes entropy_coef (entropy_target, entropy_ceiling)"
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
        """Whether the current policy of every optimizer step is the old one, so that nothing is computed for
        old."""
        return self.num_minibatches == 1 and self.old_logprobs == "recompute"

    @property
    def whitened_over(self) -> WhitenedOver:
        """REINFORCE++ and GAE (as in TRL and verl) are whitened over tokens if nothing else is set."""
        if self.advantage in WHITENED and self.advantage_whitening == "none":
            return "tokens"
        return self.advantage_whitening

    @property
    def has_critic(self) -> bool:
        """Whether the advantages are computed from the values of a critic."""
        return self.advantage in FROM_VALUES

    @property
    def kl_in_token_rewards(self) -> bool:
        """Whether the KL enters the rewards from which the trainer computes advantages."""
        is_added = self.kl_in == "reward" and self.kl_coef > 0
        return is_added and (self.has_critic or self.advantage == "reinforce_pp")

    @property
    def token_level(self) -> bool:
        """Whether the trainer computes the advantages: from values, or because the KL is in the rewards that
        are whitened (REINFORCE++)."""
        return self.has_critic or self.kl_in_token_rewards

    def without_effect(self) -> list[str]:
        """One sentence for each setting that cannot act together with the rest of these settings."""
        sentences: list[str] = []
        if self.objective not in ("rl", "distillation"):
            return sentences
        if self.current_is_old and self.policy_loss in ("clip", "cispo"):
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
        if self.kl_in != "loss" and not self.kl_coef:
            sentences.append("kl_in has no effect: kl_coef is 0, so there is no KL term")
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
