"""Contradictions between settings of the algorithm: advantage, loss, KL, objective,
teacher, critic.

As those in `contradictions.py`, which runs them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from invrl.algorithms.config import GROUP_RELATIVE, LINEAR
from invrl.algorithms.length_weights import largest_scale
from invrl.algorithms.objectives import (
    DISTILLATION,
    ON_FILES,
    ON_ROLLOUTS,
    is_built_in,
    needs_of,
)
from invrl.algorithms.surrogates import ON_TOP_TOKENS

if TYPE_CHECKING:
    from invrl.run.config import Config

Contradictions = Iterator[tuple[str, str, str]]
"""Field (its value is looked up), reason, fix."""
_READ_BY: dict[str, tuple[str, ...]] = {
    "preference_beta": ("dpo", "ipo", "kto"),
    "label_smoothing": ("dpo", "simpo"),
    "simpo_beta": ("simpo",),
    "simpo_gamma": ("simpo",),
    "orpo_lambda": ("orpo",),
    "kto_desirable_weight": ("kto",),
    "kto_undesirable_weight": ("kto",),
    "aggregation": ("sft", *ON_ROLLOUTS),
    "aggregation_constant": ("sft", *ON_ROLLOUTS),
    "length_weighting": ON_ROLLOUTS,
    "kl_coef": ON_ROLLOUTS,
    "kl_clamp": ON_ROLLOUTS,
    "policy_loss": ON_ROLLOUTS,
    "ratio_level": ON_ROLLOUTS,
    "eps_clip_low": ON_ROLLOUTS,
    "eps_clip_high": ON_ROLLOUTS,
    "dual_clip": ON_ROLLOUTS,
    "correction": ON_ROLLOUTS,
    "correction_cap": ON_ROLLOUTS,
    "correction_floor": ON_ROLLOUTS,
    "rejection": ON_ROLLOUTS,
    "entropy_coef": ON_ROLLOUTS,
    "entropy_target": ON_ROLLOUTS,
    "entropy_ceiling": ON_ROLLOUTS,
    "old_logprobs": ON_ROLLOUTS,
    "router_shift_floor": ON_ROLLOUTS,
    "advantage": ("rl",),
    "advantage_eps": ("rl",),
    "reward_deviation": ("rl",),
    "solved_nll_coef": ("rl",),
}
"""Settings of the algorithm, and the built-in objectives that read them."""


def _reference(config: Config) -> Contradictions:
    algorithm = config.algorithm
    if (
        config.model.reference_model_path
        and is_built_in(algorithm.objective)
        and not needs_of(algorithm).reference
    ):
        reason = "kl_coef is 0, so no reference is computed"
        fix = "set --kl-coef, or leave --reference-model-path out"
        if algorithm.objective not in ON_ROLLOUTS:
            reason = f"the objective {algorithm.objective} has no reference"
            fix = "leave --reference-model-path out"
        yield "model.reference_model_path", reason, fix


def _advantages(config: Config) -> Contradictions:
    algorithm = config.algorithm
    name = algorithm.advantage
    samples = config.rollout.n_samples_per_prompt
    if algorithm.objective == "rl" and samples == 1 and name in GROUP_RELATIVE:
        reason = (
            f"{name} compares the rollouts of a group; with one, every advantage is 0"
        )
        yield (
            "rollout.n_samples_per_prompt",
            reason,
            "set --n-samples-per-prompt to 2 or more",
        )
    if (
        samples == 1
        and config.buffer.group_filter == "nonzero_variance"
        and not config.run.debug_train_only
    ):
        reason = (
            "it drops groups whose rewards are equal, which a group of one always is"
        )
        yield (
            "buffer.group_filter",
            reason,
            "add --group-filter none, or raise --n-samples-per-prompt",
        )
    if name == "pass_at_k" and algorithm.pass_at_k >= samples:
        reason = (
            f"it must be below n_samples_per_prompt = {samples}: all subsets of that size would be one, and "
            "every advantage 0"
        )
        yield (
            "algorithm.pass_at_k",
            reason,
            "lower --pass-at-k or raise --n-samples-per-prompt",
        )
    if (
        algorithm.discount < 1
        and config.buffer.turn_reward_use == "replace"
        and not algorithm.token_level
    ):
        reason = "no rewards are added up over turns: each token has one reward"
        yield "algorithm.discount", reason, "add --turn-reward-use add, or leave it out"
    if algorithm.reward_columns and not algorithm.token_level:
        reason = f"the advantage {name} has no rewards of tokens"
        yield "algorithm.reward_columns", reason, "leave it out, or use --advantage gae"
    declared = config.gateway.declared_columns
    for column in algorithm.reward_columns:
        if column not in declared or declared[column].level == "rollout":
            reason = f"extra_columns declares no column {column!r} of tokens or turns"
            yield (
                "algorithm.reward_columns",
                reason,
                f"add --extra-columns {column}:token, or leave it out",
            )
    yield from _overlong(config)


def _overlong(config: Config) -> Contradictions:
    algorithm = config.algorithm
    fields = type(algorithm).model_fields
    length = algorithm.overlong_length or config.rollout.max_new_tokens
    if algorithm.overlong_buffer > length:
        reason = f"a rollout may sample {length} tokens, and the penalty grows over the last of them"
        yield "algorithm.overlong_buffer", reason, "lower it, or set --overlong-length"
    for field in ("overlong_length", "overlong_penalty"):
        if (
            not algorithm.overlong_buffer
            and getattr(algorithm, field) != fields[field].default
        ):
            reason = "the length over which the penalty grows, overlong_buffer, is 0: there is no penalty"
            yield (
                f"algorithm.{field}",
                reason,
                "set --overlong-buffer, or leave this out",
            )


def _loss(config: Config) -> Contradictions:
    """Between the loss's axes."""
    algorithm = config.algorithm
    if 0 < algorithm.dual_clip <= 1:
        reason = "it must be above 1: at 1 or below, tokens with a negative advantage would have no gradient"
        yield (
            "algorithm.dual_clip",
            reason,
            "set --dual-clip above 1 (3 is usual), or 0 for none",
        )
    if algorithm.aggregation == "constant" and not algorithm.aggregation_constant:
        reason = "the aggregation `constant` divides by it"
        yield (
            "algorithm.aggregation_constant",
            reason,
            "set it, to --max-new-tokens for example",
        )
    surrogate = algorithm.policy_loss
    if algorithm.ratio_level != "token":
        if surrogate in ("dppo_tv", "dppo_kl", *ON_TOP_TOKENS):
            verb = "changes the ratios of" if surrogate == "simko" else "masks"
            reason = f"{surrogate} {verb} single tokens by their own probabilities"
            yield "algorithm.ratio_level", reason, "leave --ratio-level out"
        if surrogate in ("vespo", "policy_gradient"):
            yield (
                "algorithm.ratio_level",
                f"{surrogate} has no ratio",
                "leave --ratio-level out",
            )
        if surrogate == "gmpo":
            reason = "gmpo clips the ratios of single tokens before it takes their mean"
            yield "algorithm.ratio_level", reason, "leave --ratio-level out"
    if algorithm.ratio_level != "token" or surrogate == "gmpo":
        level = "gmpo" if surrogate == "gmpo" else algorithm.ratio_level
        reason = (
            f"a {level} ratio is one number for all tokens of a row, and this would give each of them a "
            "factor of its own"
        )
        if algorithm.correction == "truncated":
            fix = "set --correction geometric_truncated, sequence_truncated or none"
            yield "algorithm.correction", reason, fix
        if algorithm.rejection == "token":
            yield (
                "algorithm.rejection",
                reason,
                "set --rejection geometric, sequence or none",
            )
    if surrogate == "vespo" and algorithm.correction != "none":
        reason = "vespo's weight goes from the policy that sampled to the current one: it would count twice"
        yield "algorithm.correction", reason, "set --correction none"
    yield from _bounds_of_corrections(config)
    yield from _router_shift(config)


def _router_shift(config: Config) -> Contradictions:
    """What of RSPO's weight contradicts other settings. The model and its layout are
    checked with it (`TrainConfig.check_model`)."""
    algorithm = config.algorithm
    field = "algorithm.router_shift_floor"
    if not algorithm.router_shift_floor or algorithm.objective not in ON_ROLLOUTS:
        return
    if algorithm.old_logprobs != "recompute":
        reason = (
            f"with --old-logprobs {algorithm.old_logprobs} no pass says what the routers were like under the "
            "old policy"
        )
        yield field, reason, "use --old-logprobs recompute, or leave it out"
    elif algorithm.current_is_old:
        reason = "a batch has one optimizer step, in which the current policy is the old one: no router moves"
        yield field, reason, "set --num-minibatches to 2 or more, or leave it out"
    if algorithm.policy_loss in ("vespo", "policy_gradient"):
        yield (
            field,
            f"{algorithm.policy_loss} has no ratio that it could weigh",
            "leave it out",
        )


def _length_weights(config: Config) -> Contradictions:
    algorithm = config.algorithm
    fields = type(algorithm).model_fields
    if algorithm.length_weighting == "none":
        for name in ("length_lambda", "length_lambda_lr", "length_lambda_scale"):
            if getattr(algorithm, name) != fields[name].default:
                reason = (
                    "no rollout is weighted by its length (length_weighting is none)"
                )
                yield (
                    f"algorithm.{name}",
                    reason,
                    "add --length-weighting power, or leave it out",
                )
        return
    samples = config.rollout.n_samples_per_prompt
    if samples == 1:
        reason = (
            "lengths are compared within a group; with one rollout every weight is 1"
        )
        yield (
            "rollout.n_samples_per_prompt",
            reason,
            "set --n-samples-per-prompt to 2 or more",
        )
        return
    bound = largest_scale(samples)
    if algorithm.length_lambda_scale >= bound:
        reason = f"in a group of {samples} a rollout may be so short that 1 + r z is not above 0, and has no power"
        yield "algorithm.length_lambda_scale", reason, f"set it below {bound:.4g}"


def _top_logprobs(config: Config) -> Contradictions:
    """An objective that reads the likeliest tokens, in a run that does not record them.
    (Rows that were recorded earlier are checked when they are trained.)"""
    algorithm = config.algorithm
    if config.run.debug_train_only or config.run.debug_rollout_only:
        return
    if config.rollout.rollout_top_logprobs or not needs_of(algorithm).top_logprobs:
        return
    reader = f"the objective {algorithm.objective}"
    if algorithm.policy_loss in ON_TOP_TOKENS:
        reader = f"the policy loss {algorithm.policy_loss}"
    reason = f"{reader} reads the likeliest tokens in the place of each sampled one, and none are recorded"
    yield (
        "rollout.rollout_top_logprobs",
        reason,
        "set --rollout-top-logprobs, to 20 for example (SimKO: 3)",
    )


def _bounds_of_corrections(config: Config) -> Contradictions:
    algorithm = config.algorithm
    if algorithm.correction_floor > algorithm.correction_cap:
        reason = f"it is above correction_cap = {algorithm.correction_cap:g}"
        yield (
            "algorithm.correction_floor",
            reason,
            "lower --correction-floor or raise --correction-cap",
        )
    low = algorithm.rejection_low
    high = algorithm.rejection_high
    if algorithm.rejection == "none":
        for name in ("rejection_low", "rejection_high"):
            if getattr(algorithm, name):
                fix = "set --rejection token, sequence or geometric, or leave it out"
                yield (
                    f"algorithm.{name}",
                    "nothing is rejected (rejection is none)",
                    fix,
                )
        return
    if not low and not high:
        reason = "neither bound is set, so nothing is rejected"
        yield (
            "algorithm.rejection",
            reason,
            "set --rejection-high, --rejection-low or both",
        )
    why = "a ratio of 1, where engine and trainer agree, would be rejected"
    if low >= 1:
        yield "algorithm.rejection_low", why, "set it below 1"
    if 0 < high <= 1:
        yield "algorithm.rejection_high", why, "set it above 1"


def _kl(config: Config) -> Contradictions:
    algorithm = config.algorithm
    if algorithm.reference_reset_optimizer and not algorithm.reference_reset_steps:
        reason = "reference_reset_steps is 0, so nothing is reset"
        yield (
            "algorithm.reference_reset_optimizer",
            reason,
            "set --reference-reset-steps, or leave it out",
        )
    if not algorithm.kl_coef:
        if algorithm.kl_target:
            reason = "kl_coef is 0, and what is adapted by factors stays 0"
            yield (
                "algorithm.kl_target",
                reason,
                "set --kl-coef, the coefficient to begin with",
            )
        for name in ("reference_reset_steps", "reference_ema"):
            if getattr(algorithm, name) and is_built_in(algorithm.objective):
                yield (
                    f"algorithm.{name}",
                    "kl_coef is 0, so there is no reference",
                    "set --kl-coef",
                )
        return
    if algorithm.reference_reset_steps and algorithm.reference_ema:
        reason = "a reference that is reset would lose its average; the two exclude each other"
        yield (
            "algorithm.reference_ema",
            reason,
            "give one of --reference-ema and --reference-reset-steps",
        )
    if algorithm.reference_moves and config.train.reference_placement == "cpu_by_layer":
        reason = "by layer the reference is kept in the dtype of its folder, which the trained weights are not"
        yield (
            "train.reference_placement",
            reason,
            "use --reference-placement cpu or device",
        )
    if algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        reason = (
            "as a term of the loss k1 is only noise: its gradient is that of the tokens' log-probs, whose "
            "mean over samples of the policy is 0"
        )
        yield (
            "algorithm.kl_estimator",
            reason,
            "set --kl-in reward, or --kl-estimator k2, k3 or unbiased",
        )
    if algorithm.kl_in != "loss" and algorithm.kl_estimator == "unbiased":
        reason = (
            "its importance weight is there for its gradient, and a reward has none"
        )
        yield "algorithm.kl_estimator", reason, "set --kl-estimator k1, or --kl-in loss"
    if algorithm.kl_in_rollout_rewards:
        if algorithm.advantage not in LINEAR:
            reason = (
                "the KL is known after advantages were computed, and only those that are linear in rewards "
                f"can be completed with it: {', '.join(LINEAR)}"
            )
            yield "algorithm.kl_in", reason, "set --kl-in reward, or --advantage rloo"
        elif algorithm.advantage_whitening != "none":
            reason = (
                "advantages would be whitened without the KL, which is added after it"
            )
            yield (
                "algorithm.advantage_whitening",
                reason,
                "leave it out, or set --kl-in reward",
            )


def _entropy(config: Config) -> Contradictions:
    algorithm = config.algorithm
    if 0 < algorithm.entropy_ceiling <= algorithm.entropy_target:
        reason = f"it is not above entropy_target = {algorithm.entropy_target:g}, the other end of the band"
        yield (
            "algorithm.entropy_ceiling",
            reason,
            "raise --entropy-ceiling or lower --entropy-target",
        )
    is_adapted = algorithm.entropy_target or algorithm.entropy_ceiling
    default = type(algorithm).model_fields["entropy_coef_step"].default
    if algorithm.entropy_coef_step != default and not is_adapted:
        reason = "entropy_coef is not adapted: neither entropy_target nor entropy_ceiling is set"
        yield (
            "algorithm.entropy_coef_step",
            reason,
            "set one of them, or leave this out",
        )


def _objective(config: Config) -> Contradictions:
    """Settings that the objective does not read, and rows that it cannot train on."""
    algorithm = config.algorithm
    name = algorithm.objective
    if not is_built_in(name):
        return
    for field, objectives in _READ_BY.items():
        value = getattr(algorithm, field)
        if (
            value != type(algorithm).model_fields[field].default
            and name not in objectives
        ):
            reason = (
                f"the objective {name} does not read it, only {', '.join(objectives)}"
            )
            yield (
                f"algorithm.{field}",
                reason,
                "leave it out, or choose another --objective",
            )


def _teacher(config: Config) -> Contradictions:
    model = config.model
    given = [
        name for name in ("teacher_model_path", "teacher_url") if getattr(model, name)
    ]
    if config.algorithm.objective != DISTILLATION:
        if is_built_in(config.algorithm.objective):
            for name in given:
                reason = f"the objective {config.algorithm.objective} has no teacher"
                yield (
                    f"model.{name}",
                    reason,
                    "add --objective distillation, or leave it out",
                )
        return
    if len(given) == 2:
        reason = "there is a teacher_model_path too, and a run has one teacher"
        yield "model.teacher_url", reason, "leave one of the two out"
    if not given and not config.run.debug_train_only:
        fix = (
            "give --teacher-model-path FOLDER, or --teacher-url URL of an SGLang server"
        )
        yield "algorithm.objective", "distillation needs a teacher", fix
    if model.teacher_url:
        yield from _teacher_server(config)
    if (
        config.buffer.group_filter == "nonzero_variance"
        and not config.run.debug_train_only
    ):
        reason = "it drops groups whose rewards are equal, and distillation learns from them as from any other"
        yield "buffer.group_filter", reason, "add --group-filter none"


def _teacher_server(config: Config) -> Contradictions:
    model = config.model
    reason = _fault_of_teacher_url(model.teacher_url)
    if reason:
        yield "model.teacher_url", reason, "give it as http://10.0.0.5:30000"
    if config.run.debug_train_only:
        reason = "saved batches have the teacher's log-probs already"
        yield "model.teacher_url", reason, "leave it out"
    if config.rollout.temperature != 1.0:
        reason = "SGLang scores given tokens at temperature 1, so the teacher would be another distribution"
        fix = "use --temperature 1, or --teacher-model-path, which follows the temperature"
        yield "rollout.temperature", reason, fix
    if config.gateway.constrained == "masked":
        reason = "SGLang scores given tokens over the whole vocabulary, and the student has a grammar's part"
        yield "gateway.constrained", reason, "leave it out, or use --teacher-model-path"


def _fault_of_teacher_url(url: str) -> str:
    """What is wrong with it; "" if nothing is."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "not an http:// or https:// URL"
    if parts.username or parts.password:
        return "it holds a user or a key, which come from the environment only"
    return ""


_OF_THE_CRITIC = {
    "algorithm": (
        "gae_lambda",
        "critic_gae_lambda",
        "gae_length_alpha",
        "value_targets",
        "vtrace_rho_cap",
        "vtrace_c_cap",
        "value_clip",
    ),
    "train": (
        "critic_lr",
        "critic_lr_warmup_steps",
        "critic_clip_grad",
        "critic_warmup_steps",
        "critic_data_parallel_size",
    ),
    "model": ("critic_model_path",),
}
"""Settings that act only where a critic is trained, by table."""


def _critic(config: Config) -> Contradictions:
    algorithm = config.algorithm
    if algorithm.has_critic and algorithm.objective in ON_FILES:
        reason = f"the objective {algorithm.objective} trains on rows that are given: it has no advantages"
        yield (
            "algorithm.advantage",
            reason,
            "leave --advantage out, or use --objective rl",
        )
    if not algorithm.has_critic and is_built_in(algorithm.objective):
        for table, names in _OF_THE_CRITIC.items():
            section = getattr(config, table)
            for name in names:
                if getattr(section, name) != type(section).model_fields[name].default:
                    reason = (
                        f"with advantage = {algorithm.advantage!r} there is no critic"
                    )
                    fix = (
                        f"add --advantage gae, or leave --{name.replace('_', '-')} out"
                    )
                    yield f"{table}.{name}", reason, fix
    if algorithm.value_targets == "vtrace":
        if algorithm.old_logprobs != "recompute":
            reason = f"with --old-logprobs {algorithm.old_logprobs} no ratio to the policy that sampled is known"
            yield (
                "algorithm.value_targets",
                reason,
                "use --old-logprobs recompute, or leave this out",
            )
        if algorithm.correction != "none":
            reason = "V-trace's advantages contain the ratio old/rollout already"
            yield "algorithm.correction", reason, "use --correction none"
        if algorithm.gae_length_alpha:
            reason = "V-trace has one lambda, gae_lambda, for all rows"
            yield (
                "algorithm.gae_length_alpha",
                reason,
                "leave it out, or --value-targets",
            )
        if algorithm.critic_gae_lambda != algorithm.gae_lambda:
            reason = "V-trace has one lambda, gae_lambda, for advantages and targets"
            yield (
                "algorithm.critic_gae_lambda",
                reason,
                "leave it out, or --value-targets",
            )
    else:
        for name in ("vtrace_rho_cap", "vtrace_c_cap"):
            if getattr(algorithm, name) != type(algorithm).model_fields[name].default:
                yield (
                    f"algorithm.{name}",
                    "value_targets is not vtrace",
                    "add --value-targets vtrace",
                )
    if config.train.critic_warmup_steps >= config.run.num_steps:
        reason = (
            f"the run has {config.run.num_steps} steps, so the policy would never learn"
        )
        yield "train.critic_warmup_steps", reason, "lower it, or raise --num-steps"


ON_DATA = (
    _reference,
    _critic,
    _loss,
    _length_weights,
    _kl,
    _entropy,
    _objective,
    _teacher,
)
"""For a run on a file."""
WITH_ROLLOUTS = (
    _reference,
    _advantages,
    _critic,
    _loss,
    _length_weights,
    _top_logprobs,
    _kl,
    _entropy,
    _objective,
    _teacher,
)
