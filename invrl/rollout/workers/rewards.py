"""Converts return values of user code to a reward that may be trained on: one finite
float, or a named reason.

Pure functions. Invariants: a reward that leaves this module is a finite float within
`MAX_REWARD`; its components pass the gateway's checks. Numbers of extra columns are
finite and of the right types; whether they are declared, and as many as the tokens, is
checked by the gateway, which knows both.
"""

import math
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Generator,
    Mapping,
    Sequence,
)
from numbers import Real

import numpy as np

from invrl.interfaces import RolloutResult, components_fault
from invrl.types.extra_columns import MAX_NUMBER, ExtraNumbers, is_number
from invrl.types.reasons import FailureReason
from invrl.types.sessions import MAX_NAME_LENGTH, MAX_REWARD

_VALUE_CHARS = 80


class Rejected(Exception):
    """User code returned a value that cannot be used. The runner catches it."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def as_result(returned: object) -> RolloutResult:
    """Convert the return value of a rollout function to a RolloutResult. A bool counts
    as 0 or 1, and numpy scalars are numbers. Raises Rejected (BAD_RETURN) naming the
    value, its type and the fix."""
    if isinstance(returned, RolloutResult):
        if not isinstance(returned.components, Mapping):
            detail = f"RolloutResult.components is a {type(returned.components).__name__}, not a mapping"
            raise Rejected(FailureReason.BAD_RETURN, detail)
        return returned
    if isinstance(returned, Real | np.bool_):
        return RolloutResult(reward=returned)  # type: ignore[arg-type]
    detail = f"the rollout function returned {_shown(returned)}, not a number. Fix: {_number_fix(returned)}"
    raise Rejected(FailureReason.BAD_RETURN, detail)


def valid_numbers(result: RolloutResult) -> ExtraNumbers:
    """Return the numbers of extra columns as plain floats. Raises Rejected (BAD_RETURN)
    naming the field, the value and the fix."""
    turn_numbers: dict[str, Mapping[str, float]] = {}
    for turn_id, numbers in _named_entries("turn_numbers", result.turn_numbers):
        turn_numbers[turn_id] = _numbers_by_name(f"turn_numbers[{turn_id!r}]", numbers)
    token_numbers: dict[str, Mapping[str, Sequence[float]]] = {}
    for turn_id, columns in _named_entries("token_numbers", result.token_numbers):
        field = f"token_numbers[{turn_id!r}]"
        token_numbers[turn_id] = {
            name: _number_list(f"{field}[{name!r}]", values)
            for name, values in _named_entries(field, columns)
        }
    return ExtraNumbers(
        numbers=_numbers_by_name("numbers", result.numbers),
        turn_numbers=turn_numbers,
        token_numbers=token_numbers,
    )


def _named_entries(field: str, mapping: object) -> list[tuple[str, object]]:
    """Return the entries of a mapping whose keys are text that JSON can carry."""
    if not isinstance(mapping, Mapping):
        raise _bad_numbers(
            field, f"is {_shown(mapping)}, not a mapping", "return a dict"
        )
    entries: list[tuple[str, object]] = []
    for key, value in mapping.items():
        if (
            not isinstance(key, str)
            or len(key) > MAX_NAME_LENGTH
            or not key.isprintable()
        ):
            fix = "use names of declared columns, and ids of answers for turns"
            raise _bad_numbers(field, f"has the key {_shown(key)}", fix)
        entries.append((key, value))
    return entries


def _numbers_by_name(field: str, numbers: object) -> dict[str, float]:
    return {
        name: _number(f"{field}[{name!r}]", value)
        for name, value in _named_entries(field, numbers)
    }


def _number(field: str, value: object) -> float:
    if not isinstance(value, Real | np.bool_):
        raise _bad_numbers(field, f"is {_shown(value)}, not a number", "return a float")
    number = _as_float(value)
    if not is_number(number):
        reason = (
            f"is {number:g}, not a finite number within ±{MAX_NUMBER:.6g} (float32)"
        )
        raise _bad_numbers(
            field,
            reason,
            "leave the name out where there is none: the default counts then",
        )
    return number


def _number_list(field: str, values: object) -> list[float]:
    """Convert a list, tuple, array or tensor of numbers, one for each token."""
    if isinstance(values, list | tuple):
        return [
            _number(f"{field}[{position}]", value)
            for position, value in enumerate(values)
        ]
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__array__"):
        reason = f"is {_shown(values)}, not a list of numbers"
        raise _bad_numbers(
            field, reason, "return a list with one number for each sampled token"
        )
    values_T = np.asarray(values)
    if values_T.ndim != 1 or values_T.dtype.kind not in "biuf":
        reason = f"is an array of shape {values_T.shape} and dtype {values_T.dtype}"
        raise _bad_numbers(
            field, reason, "return one axis of numbers, one for each sampled token"
        )
    return [
        _number(f"{field}[{position}]", value)
        for position, value in enumerate(values_T.tolist())
    ]


def _bad_numbers(field: str, reason: str, fix: str) -> Rejected:
    return Rejected(
        FailureReason.BAD_RETURN, f"RolloutResult.{field} {reason}. Fix: {fix}"
    )


def valid_reward(value: object, name: str = "the reward") -> float:
    """Return `value` as a finite float. Raises Rejected (BAD_REWARD) naming the value,
    its type and the fix."""
    if value is None:
        fix = "return a float, or RolloutResult(reward=...)"
        raise Rejected(
            FailureReason.BAD_REWARD, f"{name} is None, not a number. Fix: {fix}"
        )
    if not isinstance(value, Real | np.bool_):
        detail = f"{name} is {_shown(value)}, not a number. Fix: {_number_fix(value)}"
        raise Rejected(FailureReason.BAD_REWARD, detail)
    number = _as_float(value)
    if not math.isfinite(number):
        fix = "return a finite number; where nothing can be measured (0/0, an empty list), return 0.0"
        raise Rejected(
            FailureReason.BAD_REWARD,
            f"{name} is {number}, not a finite number. Fix: {fix}",
        )
    if abs(number) > MAX_REWARD:
        fix = "scale it down; 0 to 1 is usual"
        raise Rejected(
            FailureReason.BAD_REWARD,
            f"{name} is {number:g}, beyond ±{MAX_REWARD:g}. Fix: {fix}",
        )
    return number


def _as_float(value: Real | np.bool_) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _shown(value: object) -> str:
    """Format the value, shortened, with its type."""
    try:
        text = repr(value)
    except Exception:  # an object's __repr__ is user code
        text = "something that cannot be shown"
    if len(text) > _VALUE_CHARS:
        text = f"{text[:_VALUE_CHARS]}..."
    return f"{text} (type {type(value).__name__})"


def _number_fix(value: object) -> str:
    """Say how to return a number instead of this value."""
    if value is None:
        return "a `return` is missing, or one path ends without it; return a float on every path"
    if isinstance(value, Awaitable):
        return "an `await` is missing: return what it gives"
    if isinstance(value, Generator | AsyncGenerator):
        return "a function with `yield` is a generator: write `return` instead"
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
    """Return the named parts of a reward as finite floats, with names that JSON can
    carry. Raises Rejected (BAD_REWARD).

    The bounds that RolloutResult checks are checked again, because user code may have
    changed the mapping since. Names that are not strings become strings here.
    """
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
