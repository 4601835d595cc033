"""Objectives by name: what a training step minimizes, and its inputs.

An objective is a function of the trained tokens of one micro-batch (`LossInputs`) that
returns a loss and metrics. `Needs` says which of its inputs cost a model pass; the step
computes only those. The driver asks for the needs before anything starts, so torch is
imported only where an objective is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from invrl.algorithms.policy_losses import ON_TOP_TOKENS
from invrl.errors import PluginError
from invrl.interfaces import Objective
from invrl.user_code.plugins import load_plugin

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from invrl.algorithms.config import AlgorithmConfig
    from invrl.algorithms.sample_table import SampleTable

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Inputs of an objective that cost a model pass.

    A user's objective has them as its attribute `needs`; without that attribute it
    needs nothing.
    """

    old: bool = False
    """Log-probs under the policy before the batch's first optimizer step."""
    reference: bool = False
    """Log-probs under the frozen reference."""
    values: bool = False
    """A critic's values of the tokens. The critic is then trained together with the
    policy."""
    sample_table: bool = False
    """Sums of all samples of a mini-batch under the current policy (`sample_table.py`). The
    objective then has a method `couple`."""
    teacher: bool = False
    """Log-probs under the teacher, as the column `teacher`."""
    top_logprobs: bool = False
    """Log-probs of the likeliest tokens at each trained one, recorded by the run
    (`--rollout-top-logprobs`): `LossInputs.top`."""
    router_shift: bool = False
    """Shift of the expert routers from the old policy (`router_shift.py`):
    `LossInputs.router_shift_N`. Requires `old`, a model with experts and one pipeline
    stage."""
    mismatched_samples: bool = False
    """Additional samples, each with one sample's prompt and another's reply
    (`mismatched_samples.py`)."""


NO_NEEDS = Needs()


def is_built_in(name: str) -> bool:
    return name in ON_ROLLOUTS or name in ON_FILES


def objective_needs(config: AlgorithmConfig) -> Needs:
    """Return the needs of the objective. Raises PluginError for a user's objective that
    cannot be loaded, whose needs have another type, or which does not name the values
    that the advantage needs."""
    match config.objective:
        case "rl":
            return Needs(
                old=config.old_logprobs == "recompute",
                reference=config.kl is not None,
                values=config.has_critic,
                top_logprobs=config.policy_loss in ON_TOP_TOKENS,
                router_shift=config.router_shift_floor is not None,
            )
        case "distillation":
            return Needs(
                old=config.old_logprobs == "recompute",
                reference=config.kl is not None,
                teacher=True,
                top_logprobs=config.policy_loss in ON_TOP_TOKENS,
                router_shift=config.router_shift_floor is not None,
            )
        case "sft":
            return Needs()
        case "dpo" | "ipo":
            return Needs(reference=True, sample_table=True)
        case "orpo" | "simpo":
            return Needs(sample_table=True)
        case "kto":
            return Needs(reference=True, sample_table=True, mismatched_samples=True)
    needs = _declared_needs(
        config.objective, load_plugin(config.objective, "objective", Objective)
    )
    if config.has_critic and not needs.values:
        reason = f"--advantage {config.advantage} needs a critic, which its attribute `needs` does not name"
        fix = "declare Needs(values=True, ...), or use an advantage without a critic (--advantage grpo)"
        raise PluginError("objective", config.objective, reason, fix)
    return replace(needs, reference=needs.reference or config.kl_in_token_rewards)


def load_objective(config: AlgorithmConfig) -> Objective:
    """Return the built-in of that name with these settings, or the user's function at
    `module:name`. Raises PluginError."""
    if not is_built_in(config.objective):
        return load_plugin(config.objective, "objective", Objective)
    from invrl.algorithms.distillation import distillation_loss
    from invrl.algorithms.losses import policy_loss
    from invrl.algorithms.preferences import KtoObjective, PairObjective
    from invrl.algorithms.sft import sft_loss

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


def _declared_needs(name: str, objective: Objective) -> Needs:
    needs = getattr(objective, "needs", Needs())
    if not isinstance(needs, Needs):
        reason = f"its attribute `needs` is {needs!r}"
        raise PluginError(
            "objective", name, reason, "write it as Needs(old=..., reference=...)"
        )
    if needs.router_shift and not needs.old:
        reason = "its needs name the router shift, which is measured from the old policy, and not `old`"
        raise PluginError(
            "objective", name, reason, "declare Needs(router_shift=True, old=True, ...)"
        )
    if needs.sample_table:
        load_coupling(name, objective)
    return needs
