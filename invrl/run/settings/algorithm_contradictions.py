"""Contradictions between settings of the algorithm: advantage, loss, KL, objective,
teacher, critic.

`contradictions.py` runs them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from invrl.algorithms.config import GROUP_RELATIVE, LINEAR, AlgorithmConfig
from invrl.algorithms.objectives.objectives import (
    DISTILLATION,
    ON_FILES,
    ON_ROLLOUTS,
    is_built_in,
    objective_needs,
)
from invrl.algorithms.policy_loss.axis_plugins import axis_plugins
from invrl.interfaces import ChecksSettings
from invrl.user_code.plugins import plugin_name

if TYPE_CHECKING:
    from invrl.algorithms.tables import KlConfig
    from invrl.run.settings.config import Config

Contradictions = Iterator[tuple[str, str, str]]
"""Field (whose value is looked up), reason, fix."""
_READ_BY: dict[tuple[str, ...], tuple[str, ...]] = {
    ("sft", *ON_ROLLOUTS): ("aggregation", "aggregation_constant"),
    ON_ROLLOUTS: (
        "sample_weight",
        "kl",
        "policy_loss",
        "ratio_level",
        "eps_clip_low",
        "eps_clip_high",
        "dual_clip",
        "correction",
        "correction_cap",
        "correction_floor",
        "rejection",
        "entropy",
        "old_logprobs",
        "ratio_weight",
        "adaptations",
    ),
    ("rl",): (
        "advantage",
        "advantage_std.eps",
        "advantage_std.estimator",
        "solved_nll_coef",
    ),
}
"""Settings of the algorithm, by the built-in objectives that read them."""
_WITHOUT_SEQUENCE_RATIO = {
    "dppo_tv": "dppo_tv masks single tokens by their own probabilities",
    "dppo_kl": "dppo_kl masks single tokens by their own probabilities",
    "vespo": "vespo has no ratio",
    "policy_gradient": "policy_gradient has no ratio",
    "gmpo": "gmpo clips the ratios of single tokens before it takes their mean",
}
"""Reasons for which a policy loss has no ratio of a whole sequence."""


def _reference(config: Config) -> Contradictions:
    algorithm = config.algorithm
    if (
        config.model.reference_model_path
        and is_built_in(algorithm.objective)
        and not objective_needs(algorithm).reference
    ):
        reason = "there is no KL, so no reference is computed"
        fix = "set --kl.coefficient, or leave --reference-model-path out"
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
        and config.buffer.turn_rewards.use == "replace"
        and not algorithm.token_level
    ):
        reason = "no rewards are added up over turns: each token has one reward"
        yield (
            "algorithm.discount",
            reason,
            "add --turn-rewards.use add, or leave it out",
        )
    if algorithm.reward_columns and not algorithm.token_level:
        reason = f"the advantage {name} has no rewards of tokens"
        yield "algorithm.reward_columns", reason, "leave it out, or use --advantage gae"
    declared = config.gateway.session.declared_columns
    for column in algorithm.reward_columns:
        if column not in declared or declared[column].level == "rollout":
            reason = f"extra_columns declares no column {column!r} of tokens or turns"
            yield (
                "algorithm.reward_columns",
                reason,
                f"add --session.extra-columns {column}:token, or leave it out",
            )
    yield from _overlong(config)


def _overlong(config: Config) -> Contradictions:
    overlong = config.algorithm.overlong
    if overlong is None:
        return
    length = overlong.length or config.rollout.max_new_tokens
    if overlong.buffer > length:
        reason = f"a rollout may sample {length} tokens, and the penalty grows over the last of them"
        yield "overlong.buffer", reason, "lower it, or set --overlong.length"


def _loss(config: Config) -> Contradictions:
    """Contradictions between the loss's axes."""
    algorithm = config.algorithm
    if algorithm.aggregation == "constant" and not algorithm.aggregation_constant:
        reason = "the aggregation `constant` divides by it"
        yield (
            "algorithm.aggregation_constant",
            reason,
            "set it, to --max-new-tokens for example",
        )
    policy_loss = algorithm.policy_loss
    if algorithm.ratio_level != "token" and policy_loss in _WITHOUT_SEQUENCE_RATIO:
        reason = _WITHOUT_SEQUENCE_RATIO[policy_loss]
        yield "algorithm.ratio_level", reason, "leave --ratio-level out"
    if algorithm.ratio_level != "token" or policy_loss == "gmpo":
        level = "gmpo" if policy_loss == "gmpo" else algorithm.ratio_level
        reason = (
            f"a {level} ratio is one number for all tokens of a row, and this would give each of them a "
            "factor of its own"
        )
        if algorithm.correction == "truncated":
            fix = "set --correction geometric_truncated, sequence_truncated or none"
            yield "algorithm.correction", reason, fix
        if algorithm.rejection is not None and algorithm.rejection.kind == "token":
            yield (
                "rejection.kind",
                reason,
                "set --rejection geometric, sequence or none",
            )
    if policy_loss == "vespo" and algorithm.correction != "none":
        reason = "vespo's weight goes from the policy that sampled to the current one: it would count twice"
        yield "algorithm.correction", reason, "set --correction none"
    yield from _correction_bounds(config)


def _plugins(config: Config) -> Contradictions:
    """User code of the axes that contradicts other settings, and tables that none
    has."""
    algorithm = config.algorithm
    if algorithm.objective not in ON_ROLLOUTS:
        paths = [algorithm.objective]
    else:
        plugins = list(axis_plugins(algorithm))
        paths = [plugin.path for plugin in plugins]
        for _, _, plugin in plugins:
            if isinstance(plugin, ChecksSettings):
                plugin.check(config)
    names = [plugin_name(path) for path in (*paths, algorithm.advantage)]
    for table in algorithm.plugin.by_name:
        if table not in names:
            reason = f"no user code that the settings name is called {table}"
            fix = f"leave [plugin.{table}] out, or name what it belongs to, as in --policy-loss module:{table}"
            yield f"plugin.{table}", reason, fix


def _top_logprobs(config: Config) -> Contradictions:
    """An objective that reads the likeliest tokens, in a run that does not record them.
    (Samples recorded earlier are checked when they are trained.)"""
    algorithm = config.algorithm
    if config.run.debug_train_only or config.run.debug_rollout_only:
        return
    if (
        config.rollout.rollout_top_logprobs
        or not objective_needs(algorithm).top_logprobs
    ):
        return
    reader = f"the objective {algorithm.objective}"
    if algorithm.objective in ON_ROLLOUTS:
        reader = f"the policy loss {algorithm.policy_loss}"
    reason = f"{reader} reads the likeliest tokens in the place of each sampled one, and none are recorded"
    yield (
        "rollout.rollout_top_logprobs",
        reason,
        "set --rollout-top-logprobs, to 20 for example (SimKO: 3)",
    )


def _correction_bounds(config: Config) -> Contradictions:
    algorithm = config.algorithm
    floor = algorithm.correction_floor
    if floor is not None and floor > algorithm.correction_cap:
        reason = f"it is above correction_cap = {algorithm.correction_cap:g}"
        yield (
            "algorithm.correction_floor",
            reason,
            "lower --correction-floor or raise --correction-cap",
        )
    rejection = algorithm.rejection
    if rejection is not None and rejection.low is None and rejection.high is None:
        reason = "neither bound is set, so nothing is rejected"
        yield (
            "rejection.kind",
            reason,
            "set --rejection.high, --rejection.low or both",
        )


def _kl(config: Config) -> Contradictions:
    algorithm = config.algorithm
    if algorithm.reference.reset_optimizer and not algorithm.reference.reset_steps:
        reason = "reference.reset_steps is not set, so nothing is reset"
        yield (
            "reference.reset_optimizer",
            reason,
            "set --reference.reset-steps, or leave it out",
        )
    kl = algorithm.kl
    if kl is None:
        for name in ("reset_steps", "ema"):
            if getattr(algorithm.reference, name) and is_built_in(algorithm.objective):
                yield (
                    f"reference.{name}",
                    "there is no KL, so there is no reference",
                    "set --kl.coefficient",
                )
        return
    if algorithm.reference.reset_steps and algorithm.reference.ema:
        reason = "a reference that is reset would lose its average; the two exclude each other"
        yield (
            "reference.ema",
            reason,
            "give one of --reference.ema and --reference.reset-steps",
        )
    if algorithm.reference_moves and config.train.reference_placement == "cpu_by_layer":
        reason = "by layer the reference is kept in the dtype of its folder, which the trained weights are not"
        yield (
            "train.reference_placement",
            reason,
            "use --reference-placement cpu or device",
        )
    yield from _kl_estimator(config, kl)


def _kl_estimator(config: Config, kl: KlConfig) -> Contradictions:
    algorithm = config.algorithm
    if kl.added_to == "loss" and kl.estimator == "k1":
        reason = (
            "as a term of the loss k1 is only noise: its gradient is that of the tokens' log-probs, whose "
            "mean over samples of the policy is 0"
        )
        yield (
            "kl.estimator",
            reason,
            "set --kl.added-to reward, or --kl.estimator k2, k3 or unbiased",
        )
    if kl.added_to != "loss" and kl.estimator == "unbiased":
        reason = (
            "its importance weight is there for its gradient, and a reward has none"
        )
        yield "kl.estimator", reason, "set --kl.estimator k1, or --kl.added-to loss"
    if algorithm.kl_in_rollout_rewards:
        if algorithm.advantage not in LINEAR:
            reason = (
                "the KL is known after advantages were computed, and only those that are linear in rewards "
                f"can be completed with it: {', '.join(LINEAR)}"
            )
            yield "kl.added_to", reason, "set --kl.added-to reward, or --advantage rloo"
        elif algorithm.advantage_whitening != "none":
            reason = (
                "advantages would be whitened without the KL, which is added after it"
            )
            yield (
                "algorithm.advantage_whitening",
                reason,
                "leave it out, or set --kl.added-to reward",
            )


def _objective(config: Config) -> Contradictions:
    """Settings that the objective does not read, and samples that it cannot train
    on."""
    algorithm = config.algorithm
    name = algorithm.objective
    if not is_built_in(name):
        return
    defaults = AlgorithmConfig.model_validate({})
    for objectives, fields in _READ_BY.items():
        reason = f"the objective {name} does not read it, only {', '.join(objectives)}"
        fix = "leave it out, or choose another --objective"
        for field in fields if name not in objectives else ():
            value_of = attrgetter(field)
            if value_of(algorithm) != value_of(defaults):
                name_in_file = field if "." in field else f"algorithm.{field}"
                yield name_in_file, reason, fix


def _teacher(config: Config) -> Contradictions:
    algorithm = config.algorithm
    teacher = algorithm.teacher
    if algorithm.objective != DISTILLATION:
        if teacher is not None and is_built_in(algorithm.objective):
            reason = (
                f"there is a teacher, and the objective {algorithm.objective} has none"
            )
            yield (
                "algorithm.objective",
                reason,
                "leave --objective out, or the table [teacher]",
            )
        return
    if teacher is None or (teacher.model_path is None and teacher.url is None):
        if not config.run.debug_train_only:
            fix = "give --teacher.model-path FOLDER, or --teacher.url URL of an SGLang server"
            yield "algorithm.objective", "distillation needs a teacher", fix
    elif teacher.url is not None:
        if teacher.model_path is not None:
            reason = "there is a model_path too, and a run has one teacher"
            yield "teacher.url", reason, "leave one of the two out"
        yield from _teacher_server(config, teacher.url)
    if (
        config.buffer.group_filter == "nonzero_variance"
        and not config.run.debug_train_only
    ):
        reason = "it drops groups whose rewards are equal, and distillation learns from them as from any other"
        yield "buffer.group_filter", reason, "add --group-filter none"


def _teacher_server(config: Config, url: str) -> Contradictions:
    reason = url_fault(url, "http", "https")
    if reason:
        yield "teacher.url", reason, "give it as http://10.0.0.5:30000"
    if config.run.debug_train_only:
        reason = "saved batches have the teacher's log-probs already"
        yield "teacher.url", reason, "leave it out"
    if config.rollout.temperature != 1.0:
        reason = "SGLang scores given tokens at temperature 1, so the teacher would be another distribution"
        fix = "use --temperature 1, or --teacher.model-path, which follows the temperature"
        yield "rollout.temperature", reason, fix
    if config.gateway.constrained == "masked":
        reason = "SGLang scores given tokens over the whole vocabulary, and the student has a grammar's part"
        yield "gateway.constrained", reason, "leave it out, or use --teacher.model-path"


def url_fault(url: str, *schemes: str) -> str:
    """Return what is wrong with the URL of a server; "" if nothing is."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in schemes or not parts.hostname:
        return f"not an {' or '.join(f'{scheme}://' for scheme in schemes)} URL"
    if parts.username or parts.password:
        return "it holds a user or a key, which come from the environment only"
    return ""


def _critic(config: Config) -> Contradictions:
    algorithm = config.algorithm
    critic = algorithm.critic
    if critic is None:
        return
    if algorithm.objective in ON_FILES:
        reason = f"the objective {algorithm.objective} trains on rows that are given: it has no advantages"
        yield (
            "algorithm.objective",
            reason,
            "leave --advantage and the table [critic] out, or use --objective rl",
        )
    if critic.targets == "vtrace":
        if algorithm.old_logprobs != "recompute":
            reason = f"with --old-logprobs {algorithm.old_logprobs} no ratio to the policy that sampled is known"
            yield (
                "critic.targets",
                reason,
                "use --old-logprobs recompute, or leave this out",
            )
        if algorithm.correction != "none":
            reason = "V-trace's advantages contain the ratio old/rollout already"
            yield "algorithm.correction", reason, "use --correction none"
        if critic.length_alpha is not None:
            reason = "V-trace has one lambda, gae_lambda, for all rows"
            yield (
                "critic.length_alpha",
                reason,
                "leave it out, or --critic.targets",
            )
        if critic.returns_lambda != critic.gae_lambda:
            reason = "V-trace has one lambda, gae_lambda, for advantages and targets"
            yield (
                "critic.returns_lambda",
                reason,
                "leave it out, or --critic.targets",
            )
    else:
        for name in ("vtrace_rho_cap", "vtrace_c_cap"):
            if getattr(critic, name) != type(critic).model_fields[name].default:
                yield (
                    f"critic.{name}",
                    "the targets are not vtrace",
                    "add --critic.targets vtrace",
                )
    if critic.warmup_steps >= config.run.num_steps:
        reason = (
            f"the run has {config.run.num_steps} steps, so the policy would never learn"
        )
        yield "critic.warmup_steps", reason, "lower it, or raise --num-steps"


ON_DATA = (
    _reference,
    _critic,
    _loss,
    _plugins,
    _kl,
    _objective,
    _teacher,
)
"""Checks for a run on a file."""
WITH_ROLLOUTS = (
    _reference,
    _advantages,
    _critic,
    _loss,
    _plugins,
    _top_logprobs,
    _kl,
    _objective,
    _teacher,
)
