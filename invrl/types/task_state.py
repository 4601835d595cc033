"""Validation of the state that a task source keeps over a resume (`state()`). Pure.

It is stored in every checkpoint, so it is JSON that survives a round trip, and not
large.
"""

import math
from collections.abc import Mapping
from typing import cast

import msgspec

from invrl.types.tasks import Json

MAX_STATE_BYTES = 64 * 1024 * 1024
"""Largest state, as JSON. Enough for two numbers about each of a million tasks."""
_MAX_SHOWN_CHARS = 80


class TaskStateError(ValueError):
    """The state cannot be stored. The message names the part and the reason."""


def stored_state(state: object) -> Json:
    """Return a copy of the state as a checkpoint restores it. Raises TaskStateError
    unless it is JSON that survives a round trip and has at most `MAX_STATE_BYTES`."""
    try:
        encoded = msgspec.json.encode(state)
        copy = msgspec.json.decode(encoded)
        is_unchanged = bool(copy == state)
    except Exception as error:  # the comparison may be the user's code
        raise TaskStateError(
            _fault(state) or f"JSON cannot hold it: {error!r}"
        ) from error
    if not is_unchanged:
        raise TaskStateError(
            _fault(state) or "it does not come back from JSON as it was"
        )
    if len(encoded) > MAX_STATE_BYTES:
        raise TaskStateError(
            f"it has {len(encoded) / 2**20:.0f} MiB as JSON; at most {MAX_STATE_BYTES / 2**20:.0f} are stored"
        )
    return copy


def _fault(state: object) -> str:
    """Describe the first part of the state that is not JSON; "" if none is found."""
    try:
        return _fault_at(state, "state()")
    except RecursionError:
        return "it is nested too deeply, or contains itself"


def _fault_at(value: object, place: str) -> str:
    if value is None or isinstance(value, int):
        return ""
    if isinstance(value, str):
        is_unicode = value.encode(errors="replace").decode() == value
        return "" if is_unicode else f"{place} has lone surrogates: {_shown(value)}"
    if type(value) is float:
        return (
            ""
            if math.isfinite(value)
            else f"{place} is {value}, which JSON does not have"
        )
    if type(value) is list:
        faults = (
            _fault_at(item, f"{place}[{index}]")
            for index, item in enumerate(cast("list[object]", value))
        )
        return next((fault for fault in faults if fault), "")
    if type(value) is dict:
        return _fault_in(cast("Mapping[object, object]", value), place)
    fix = ""
    if isinstance(value, tuple | set | frozenset):
        fix = "; write a list"
    elif hasattr(value, "tolist"):  # numpy and torch
        fix = "; write its tolist()"
    return f"{place} is a {type(value).__name__}, {_shown(value)}, which JSON does not have{fix}"


def _fault_in(mapping: Mapping[object, object], place: str) -> str:
    for key, item in mapping.items():
        if not isinstance(key, str):
            return f"{place} has the key {_shown(key)}, a {type(key).__name__}; JSON's keys are strings"
        fault = _fault_at(item, f"{place}[{_shown(key)}]")
        if fault:
            return fault
    return ""


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        return "which cannot be shown"
    if len(text) > _MAX_SHOWN_CHARS:
        return f"{text[:_MAX_SHOWN_CHARS]}..."
    return text
