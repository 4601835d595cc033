"""Turns what user code returned into a reward that may be trained on: one finite float, or a named reason.

Pure functions. Invariants: a reward that leaves this module is a finite float within `MAX_REWARD`; its
components pass the gateway's checks."""

import math
from collections.abc import Awaitable, Mapping
from numbers import Real

import numpy as np

from invrl.interfaces import RolloutResult, components_fault
from invrl.reasons import FailureReason
from invrl.types import MAX_NAME_LENGTH, MAX_REWARD

_VALUE_CHARS = 80


class Rejected(Exception):
    """User code returned a value that cannot be used. The runner catches it."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def as_result(returned: object) -> RolloutResult:
    """The return value of a rollout function as a RolloutResult. A bool counts as 0 or 1, and numpy scalars
    are numbers. Raises Rejected (BAD_RETURN) naming the value, its type and the fix."""
    if isinstance(returned, RolloutResult):
        if not isinstance(returned.components, Mapping):
            detail = f"RolloutResult.components is a {type(returned.components).__name__}, not a mapping"
            raise Rejected(FailureReason.BAD_RETURN, detail)
        return returned
    if isinstance(returned, Real | np.bool_):
        return RolloutResult(reward=returned)  # type: ignore[arg-type]
    detail = f"the rollout function returned {_shown(returned)}, not a number. Fix: {_number_fix(returned)}"
    raise Rejected(FailureReason.BAD_RETURN, detail)


def valid_reward(value: object, name: str = "the reward") -> float:
    """`value` as a finite float. Raises Rejected (BAD_REWARD) naming the value, its type and the fix."""
    if value is None:
        fix = "return a float, or RolloutResult(reward=...)"
        raise Rejected(FailureReason.BAD_REWARD, f"{name} is None, not a number. Fix: {fix}")
    if not isinstance(value, Real | np.bool_):
        detail = f"{name} is {_shown(value)}, not a number. Fix: {_number_fix(value)}"
        raise Rejected(FailureReason.BAD_REWARD, detail)
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        fix = "return a finite number; where nothing can be measured (0/0, an empty list), return 0.0"
        raise Rejected(FailureReason.BAD_REWARD, f"{name} is {number}, not a finite number. Fix: {fix}")
    if abs(number) > MAX_REWARD:
        fix = "scale it down; 0 to 1 is usual"
        raise Rejected(FailureReason.BAD_REWARD, f"{name} is {number:g}, beyond ±{MAX_REWARD:g}. Fix: {fix}")
    return number


def _shown(value: object) -> str:
    """The value, shortened, with its type."""
    try:
        text = repr(value)
    except Exception:  # an object's __repr__ is user code
        text = "something that cannot be shown"
    if len(text) > _VALUE_CHARS:
        text = f"{text[:_VALUE_CHARS]}..."
    return f"{text} (type {type(value).__name__})"


def _number_fix(value: object) -> str:
    """Says how to return a number instead of this value."""
    if value is None:
        return "a `return` is missing, or one path ends without it; return a float on every path"
    if isinstance(value, Awaitable):
        return "an `await` is missing: return what it gives"
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return (
                "return a float, such as float(str(task.label) == text.strip()); a text goes into "
                "RolloutResult(output=text) where --reward-function-path judges it"
            )
        return "return float(value)"
    return "return a float, or an invrl.interfaces.RolloutResult"


def valid_components(components: Mapping[str, float]) -> dict[str, float]:
    """The named parts of a reward as finite floats, with names that JSON can carry. Raises Rejected
    (BAD_REWARD).

    The bounds that RolloutResult checks are checked again, because user code may have changed the mapping
    since. Names that are not strings become strings here."""
    fault = components_fault(components)
    if fault:
        raise Rejected(FailureReason.BAD_REWARD, fault)
    valid: dict[str, float] = {}
    for name, value in components.items():
        text = str(name).encode(errors="replace").decode()
        if len(text) > MAX_NAME_LENGTH:
            detail = f"a component's name has {len(text)} characters; at most {MAX_NAME_LENGTH} are allowed"
            raise Rejected(FailureReason.BAD_REWARD, detail)
        valid[text] = valid_reward(value, f"component {text!r}")
    return valid
