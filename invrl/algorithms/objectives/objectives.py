"""Objectives by name: what a training step minimizes, and its inputs.

An objective is a function of the trained tokens of one micro-batch (`LossInputs`) that
returns a loss and metrics. `Needs` says which of its inputs cost a model pass; the step
computes only those. The driver asks for the needs before anything starts, so torch is
imported only where an objective is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from invrl.algorithms.policy_loss.axis_plugins import axis_plugins
from invrl.errors import PluginError
from invrl.interfaces import Objective
from invrl.user_code.plugins import load_plugin

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from invrl.algorithms.config import AlgorithmConfig
    from invrl.algorithms.objectives.sample_table import SampleTable

Coupling = Callable[["SampleTable"], Mapping[str, "NDArray[np.float64]"]]
"""Maps all samples of a mini-batch to further numbers of each, [M] by name."""

POLICY_GRADIENT = "rl"
DISTILLATION = "distillation"
ON_PAIRS = ("dpo", "ipo", "orpo", "simpo")
ON_ROLLOUTS = (POLICY_GRADIENT, DISTILLATION)
"""Objectives that train on the policy's own samples."""
ON_FILES = ("sft", *ON_PAIRS, "kto")
"""Objectives that train on given samples."""
TEACHER_COLUMN = "teacher"
"""Column with the log-probs of a sample's tokens under the teacher, in nats."""
STALENESS_COLUMN = "staleness"
"""Column with the number of weight versions since a token was sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Inputs of an objective that cost a model pass, or the work of putting them
    together.

    A user's objective, or its code of one of the axes, has them as its attribute
    `needs`; without that attribute it needs nothing.
    """

    old: bool = False
    """Log-probs under the policy before the batch's first optimizer step."""
    reference: bool = False
    """Log-probs under the frozen reference."""
    values: bool = False
    """A critic's values of the tokens. The critic is then trained together with the
    policy."""
    sample_table: bool = False
    """Sums of all samples of a mini-batch under the current policy (`sample_table.py`).
    The objective then has a method `couple`."""
    teacher: bool = False
    """Log-probs under the teacher, as the column `teacher`."""
    top_logprobs: bool = False
    """Log-probs of the likeliest tokens at each trained one, recorded by the run
    (`--rollout-top-logprobs`): `LossInputs.top`."""
    router_shift: bool = False
    """Shift of the expert routers from the old policy (`router_shift.py`):
    `LossInputs.router_shift_N`. Requires `old`, a model with experts and one pipeline
    stage."""
    staleness: bool = False
    """How many weight versions ago each token was sampled, as the column
    `staleness`."""
    mismatched_samples: bool = False
    """Additional samples, each with one sample's prompt and another's reply
    (`mismatched_samples.py`)."""

    def names(self) -> set[str]:
        return {need.name for need in fields(self) if getattr(self, need.name)}


NO_NEEDS = Needs()
_OF_AXES = ("old", "reference", "top_logprobs", "router_shift", "staleness")
"""Needs that user code of one of the axes of `rl` may declare."""


def is_built_in(name: str) -> bool:
    return name in ON_ROLLOUTS or name in ON_FILES


def objective_needs(config: AlgorithmConfig) -> Needs:
    """Return the needs of the objective. Raises PluginError for a user's objective that
    cannot be loaded, whose needs have another type, or which does not name the values
    that the advantage needs."""
    match config.objective:
        case "rl":
            return replace(_needs_of_axes(config), values=config.has_critic)
        case "distillation":
            return replace(_needs_of_axes(config), teacher=True)
        case "sft":
            return Needs()
        case "dpo" | "ipo":
            return Needs(reference=True, sample_table=True)
        case "orpo" | "simpo":
            return Needs(sample_table=True)
        case "kto":
            return Needs(reference=True, sample_table=True, mismatched_samples=True)
    needs = _declared_needs("objective", config.objective, _load_objective(config))
    if config.has_critic and not needs.values:
        reason = f"--advantage {config.advantage} needs a critic, which its attribute `needs` does not name"
        fix = "declare Needs(values=True, ...), or use an advantage without a critic (--advantage grpo)"
        raise PluginError("objective", config.objective, reason, fix)
    return replace(needs, reference=needs.reference or config.kl_in_token_rewards)


def load_objective(config: AlgorithmConfig) -> Objective:
    """Return the built-in of that name with these settings, or the user's function at
    `module:name`. Raises PluginError."""
    if not is_built_in(config.objective):
        return _load_objective(config)
    from invrl.algorithms.objectives.distillation import distillation_loss
    from invrl.algorithms.objectives.preferences import KtoObjective, PairObjective
    from invrl.algorithms.objectives.sft import sft_loss
    from invrl.algorithms.policy_loss.losses import policy_loss

    if config.objective == "sft":
        return partial(sft_loss, config=config)
    if config.objective in ON_PAIRS:
        return PairObjective(config)
    if config.objective == DISTILLATION:
        return partial(distillation_loss, config=config)
    if config.objective == "kto":
        return KtoObjective(config)
    return partial(policy_loss, config=config)


def load_coupling(name: str, objective: Objective) -> Coupling:
    """Return the method with which the objective compares samples. Raises PluginError
    without one."""
    couple = getattr(objective, "couple", None)
    if callable(couple):
        return cast(Coupling, couple)
    reason = "its needs name the sample table, but it has no method `couple`"
    raise PluginError(
        "objective",
        name,
        reason,
        "add couple(table: SampleTable) -> dict of arrays [M]",
    )


def check_outputs(name: str, outputs: object) -> None:
    """Raise PluginError unless a user's objective returned a loss that can be
    trained."""
    fix = "return LossOutputs(loss=a scalar computed from inputs.current_N, metrics={...})"
    loss = getattr(outputs, "loss", None)
    if not hasattr(outputs, "metrics") or loss is None:
        raise PluginError(
            "objective",
            name,
            f"it returned {type(outputs).__name__}, not LossOutputs",
            fix,
        )
    if getattr(loss, "dim", lambda: 1)() != 0:
        found = (
            f"a tensor of shape {list(loss.shape)}"
            if hasattr(loss, "shape")
            else type(loss).__name__
        )
        raise PluginError(
            "objective", name, f"its loss is {found}, not a scalar tensor", fix
        )
    if not loss.requires_grad:
        raise PluginError(
            "objective",
            name,
            "its loss does not depend on the model: it has no gradient",
            fix,
        )


def _load_objective(config: AlgorithmConfig) -> Objective:
    return load_plugin(
        config.objective, "objective", Objective, tables=config.plugin.by_name
    )


def _needs_of_axes(config: AlgorithmConfig) -> Needs:
    """Return the needs of the axes, of which user code may declare more."""
    needs = Needs(
        old=config.old_logprobs == "recompute", reference=config.kl is not None
    )
    for setting, path, plugin in axis_plugins(config):
        declared = _declared_needs(setting, path, plugin)
        for name in declared.names() - needs.names():
            if name not in _OF_AXES:
                reason = f"its attribute `needs` names {name}, which only an objective can have"
                fix = f"leave it out; {', '.join(_OF_AXES)} are what it can have"
                raise PluginError(setting, path, reason, fix)
            needs = replace(needs, **{name: True})
    return needs


def _declared_needs(setting: str, path: str, plugin: object) -> Needs:
    needs = getattr(plugin, "needs", NO_NEEDS)
    if not isinstance(needs, Needs):
        reason = f"its attribute `needs` is {needs!r}"
        raise PluginError(
            setting, path, reason, "write it as Needs(old=..., reference=...)"
        )
    if needs.router_shift and not needs.old:
        reason = "its needs name the router shift, which is measured from the old policy, and not `old`"
        raise PluginError(
            setting, path, reason, "declare Needs(router_shift=True, old=True, ...)"
        )
    if needs.sample_table and setting == "objective":
        load_coupling(path, cast(Objective, plugin))
    return needs
