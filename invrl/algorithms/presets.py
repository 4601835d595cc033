"""Presets of the algorithm's settings by name, with the papers they follow.

A preset consists of values of `AlgorithmConfig` fields, with `False` for an absent one:
nothing else depends on its name.
"""

from collections.abc import Mapping
from typing import Literal

Value = str | float | bool
Table = Mapping[str, Value | Mapping[str, Value]]
PRESETS: dict[str, Mapping[str, Value | Table]] = {
    # arXiv 2402.03300: eq. 3, and section 4.2 for the KL coefficient and the single
    # update per batch
    "grpo": {
        "advantage": "grpo",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "dual_clip": False,
        "aggregation": "rollout_mean",
        "kl": {"coefficient": 0.04},
    },
    # arXiv 2503.20783. The constant is the paper's budget of tokens (appendix G).
    "dr_grpo": {
        "advantage": "dr_grpo",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "dual_clip": False,
        "aggregation": "constant",
        "aggregation_constant": 3000.0,
    },
    # arXiv 2503.14476, section 4.1. Its clip-higher needs several mini-batches; the
    # paper makes 16 of 512 prompts. Equation 12 takes the mean over the tokens of one
    # prompt's rollouts; the released code takes it over all tokens of a mini-batch, and
    # so does this.
    "dapo": {
        "advantage": "grpo",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.28,
        "dual_clip": False,
        "aggregation": "token_mean",
        "num_mini_batches": 4,
    },
    # arXiv 2507.18071, section 5.1
    "gspo": {
        "advantage": "grpo",
        "ratio_level": "sequence",
        "eps_clip_low": 3e-4,
        "eps_clip_high": 4e-4,
        "dual_clip": False,
        "correction": "geometric_truncated",
        "aggregation": "sequence_mean",
        "num_mini_batches": 4,
    },
    # MiniMax-M1, arXiv 2506.13585, section 3.1. The upper bound is not in the paper:
    # the cap of 5 is ScaleRL's (arXiv 2510.13786). The paper makes 16 updates a batch.
    "cispo": {
        "advantage": "grpo",
        "policy_loss": "cispo",
        "eps_clip_low": 1.0,
        "eps_clip_high": 4.0,
        "aggregation": "token_mean",
        "num_mini_batches": 4,
    },
    # arXiv 2402.14740: REINFORCE on whole rollouts, with the KL coefficient of its
    # summarization task and its 2 updates a batch.
    "rloo": {
        "advantage": "rloo",
        "policy_loss": "policy_gradient",
        "aggregation": "constant",
        "aggregation_constant": 1.0,
        "kl": {
            "coefficient": 0.03,
            "estimator": "k1",
            "added_to": "rollout_reward",
            "clamp": False,
        },
        "num_mini_batches": 2,
    },
    # arXiv 2501.03262, eq. 4 and 5, and table 1
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "dual_clip": False,
        "aggregation": "token_mean",
        "kl": {"coefficient": 0.01, "estimator": "k1", "added_to": "reward"},
    },
    # arXiv 1707.06347, with the KL of InstructGPT (arXiv 2203.02155) in the reward;
    # lambda as in both
    "ppo": {
        "advantage": "gae",
        "critic": {"gae_lambda": 0.95, "returns_lambda": 0.95, "value_clip": 0.2},
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "dual_clip": False,
        "aggregation": "token_mean",
        "kl": {"coefficient": 0.02, "estimator": "k1", "added_to": "reward"},
        "num_mini_batches": 4,
    },
    # arXiv 2504.05118, section 5.1. The paper makes 16 updates a batch.
    "vapo": {
        "advantage": "gae",
        "critic": {"returns_lambda": 1.0, "length_alpha": 0.05},
        "solved_nll_coef": 0.1,
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.28,
        "dual_clip": False,
        "aggregation": "token_mean",
        "num_mini_batches": 4,
    },
    # arXiv 2511.20347, section 5.1
    "sapo": {
        "advantage": "grpo",
        "policy_loss": "sapo",
        "sapo": {"temperature_positive": 1.0, "temperature_negative": 1.05},
        "aggregation": "sequence_mean",
        "num_mini_batches": 4,
    },
    # arXiv 2602.04879, appendix E: binary total variation around the policy that
    # sampled. The paper truncates the ratio at 5, we do not (its section 5.4), and
    # makes 8 updates a batch.
    "dppo": {
        "advantage": "dr_grpo",
        "policy_loss": "dppo_tv",
        "dppo": {"threshold": 0.2},
        "old_logprobs": "engine",
        "correction": "none",
        "aggregation": "token_mean",
        "num_mini_batches": 4,
    },
    # arXiv 2602.02710, algorithm 1
    "maxrl": {
        "advantage": "maxrl",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "dual_clip": False,
        "aggregation": "token_mean",
    },
    # AReaL, arXiv 2505.24298, table 3. Its code's bound of the weight (5, and the token
    # is left out above it) is not in the paper. The paper's advantage is the reward
    # whitened over the batch.
    "decoupled_ppo": {
        "advantage": "grpo",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "dual_clip": False,
        "old_logprobs": "recompute",
        "correction": "truncated",
        "correction_cap": 5.0,
        "rejection": {"kind": "token", "high": 5.0},
        "aggregation": "token_mean",
        "num_mini_batches": 4,
    },
    # arXiv 2512.06547: the same with an interpolated proximal policy
    "a3po": {
        "advantage": "grpo",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "dual_clip": False,
        "old_logprobs": "invrl.contrib.a3po:Interpolated",
        "correction": "truncated",
        "correction_cap": 5.0,
        "rejection": {"kind": "token", "high": 5.0},
        "aggregation": "token_mean",
        "num_mini_batches": 4,
    },
    # arXiv 2505.24864, sections 2.3 and 3.2. The paper does not report its KL
    # coefficient, and resets the reference and the optimizer when validation stagnates:
    # both numbers are ours.
    "prorl": {
        "advantage": "grpo",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.4,
        "dual_clip": False,
        "aggregation": "token_mean",
        "kl": {"coefficient": 0.001, "estimator": "k3"},
        "reference": {"reset_steps": 200, "reset_optimizer": True},
        "num_mini_batches": 4,
    },
    # arXiv 2510.06870, section 2.3. The paper's text could not be read whole: r is that
    # of a review of it. Where lambda starts, its learning rate (those of the
    # reimplementation grpo-composer) and its optimizer, plain gradient descent, are
    # ours; so are the bounds of the clip and the absence of a KL term.
    "lambda_grpo": {
        "advantage": "grpo",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.2,
        "dual_clip": False,
        "aggregation": "token_mean",
        "sample_weight": "invrl.contrib.lambda_grpo:LengthWeight",
        "adaptations": "invrl.contrib.lambda_grpo:LearnedExponent",
        "plugin": {
            "LengthWeight": {"exponent": 0.0, "scale": 1 / 9},
            "LearnedExponent": {"lr": 0.1},
        },
    },
    # arXiv 2510.23027v2: GMPO with the weight of routers that have moved. The floor is
    # the paper's, the clip GMPO's (arXiv 2507.20673). The number of updates and the
    # absence of a KL term are ours: the paper's text could not be read whole.
    "rspo": {
        "advantage": "grpo",
        "policy_loss": "gmpo",
        "eps_clip_low": 0.4,
        "eps_clip_high": 0.4,
        "ratio_weight": "invrl.contrib.router_shift:RouterShift",
        "plugin": {"RouterShift": {"floor": 0.8}},
        "correction": "geometric_truncated",
        "aggregation": "sequence_mean",
        "num_mini_batches": 4,
    },
    # arXiv 2602.10693, section 4.1. The paper makes 8 updates a batch.
    "vespo": {
        "advantage": "dr_grpo",
        "policy_loss": "vespo",
        "vespo": {
            "power_positive": 2.0,
            "decay_positive": 3.0,
            "power_negative": 3.0,
            "decay_negative": 2.0,
        },
        "correction": "none",
        "aggregation": "token_mean",
        "num_mini_batches": 4,
    },
}
"""Presets set only axes that exist. What all of them leave as it is, whatever their
paper has: the truncated correction between engine and trainer, where a preset names no
other (papers that do not know of two policies have none; with equal log-probs its
weights are 1), and where a paper makes more than 4 updates a batch, 4, because a batch
has 4 groups by default. Dynamic sampling (DAPO, CISPO) is the buffer's filter
`nonzero_variance`. Learning rates, batch sizes and sampling are not part of a
preset."""

PresetName = Literal[
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
    "lambda_grpo",
    "rspo",
]
