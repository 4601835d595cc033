"""Named presets: values of AlgorithmConfig's fields and nothing else, only axes that exist.
Where a paper's aggregation is not built yet (GRPO's mean per rollout, Dr. GRPO's constant), the preset has
the default, token_mean (DAPO's own). DAPO's dynamic sampling is the buffer's filter `nonzero_variance`."""

from __future__ import annotations

Preset = dict[str, str | float]

PRESETS: dict[str, Preset] = {
    # arXiv 2402.03300 (its KL coefficient: section 4.2)
    "grpo": {"advantage": "grpo", "eps_clip_low": 0.2, "eps_clip_high": 0.2, "kl_coef": 0.04},
    # arXiv 2503.20783
    "dr_grpo": {"advantage": "dr_grpo", "eps_clip_low": 0.2, "eps_clip_high": 0.2, "kl_coef": 0.0},
    # arXiv 2503.14476
    "dapo": {"advantage": "grpo", "eps_clip_low": 0.2, "eps_clip_high": 0.28, "kl_coef": 0.0},
}
