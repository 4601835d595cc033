"""From what user code returned to a reward that may be trained on: one finite float, or a named reason.

Pure. Invariants: a reward that leaves here is a finite float within `MAX_REWARD`; its components are such
that the gateway takes them."""

import math
from collections.abc import Mapping
from numbers import Real

import numpy as np

from invrl.interfaces import RolloutResult, components_fault
from invrl.types import MAX_NAME_LENGTH, MAX_REWARD, FailureReason


class Rejected(Exception):
    """What user code returned cannot be used. Caught by the runner, never leaves it."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def as_result(returned: object) -> RolloutResult:
    """The return value of a rollout function as a RolloutResult. A bool counts as 0 or 1; numpy
    scalars are numbers. Raises Rejected (BAD_RETURN) naming the type seen."""
    if isinstance(returned, RolloutResult):
        if not isinstance(returned.components, Mapping):
            detail = f"RolloutResult.components is a {type(returned.components).__name__}, not a mapping"
            raise Rejected(FailureReason.BAD_RETURN, detail)
        return returned
    if isinstance(returned, Real | np.bool_):
        return RolloutResult(reward=returned)  # type: ignore[arg-type]
    hint = " (a return statement is missing?)" if returned is None else ""
    detail = f"the rollout function returned {type(returned).__name__}, not a float or RolloutResult{hint}"
    raise Rejected(FailureReason.BAD_RETURN, detail)


def valid_reward(value: object, name: str = "reward") -> float:
    """`value` as a finite float. Raises Rejected (BAD_REWARD)."""
    if value is None:
        raise Rejected(FailureReason.BAD_REWARD, f"{name} is None and no reward function set it")
    if not isinstance(value, Real | np.bool_):
        raise Rejected(FailureReason.BAD_REWARD, f"{name} is a {type(value).__name__}, not a number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Rejected(FailureReason.BAD_REWARD, f"{name} is {number}, not a finite number")
    if abs(number) > MAX_REWARD:
        raise Rejected(FailureReason.BAD_REWARD, f"{name} is {number:g}, beyond ±{MAX_REWARD:g}")
    return number


def valid_components(components: Mapping[str, float]) -> dict[str, float]:
    """Named parts of a reward: finite floats, names that JSON carries. Raises Rejected (BAD_REWARD).

    The bounds of RolloutResult are checked again: a mapping may have grown since, and names that are no
    strings become strings only here."""
    if fault := components_fault(components):
        raise Rejected(FailureReason.BAD_REWARD, fault)
    valid: dict[str, float] = {}
    for name, value in components.items():
        text = str(name).encode(errors="replace").decode()
        if len(text) > MAX_NAME_LENGTH:
            detail = f"a component's name has {len(text)} characters; at most {MAX_NAME_LENGTH} fit"
            raise Rejected(FailureReason.BAD_REWARD, detail)
        valid[text] = valid_reward(value, f"component {text!r}")
    return valid
