"""Checks numbers of extra columns where they arrive, against their declaration and the
session's turns. Pure.

A turn is named by its id, or by the id of its answer, which every client has.

Invariant: numbers that pass have declared names at their declared levels, are finite as
float32, and belong to turns of the session; a turn's token numbers are as many as its
sampled tokens."""

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from invrl.errors import SessionError
from invrl.gateway.session_record import SessionRecord
from invrl.gateway.sessions.response_ids import turn_id_from_response
from invrl.types.extra_columns import (
    MAX_NUMBER,
    ExtraColumn,
    ExtraNumbers,
    Level,
    is_number,
)

_FIELDS: dict[Level, str] = {
    "rollout": "numbers",
    "turn": "turn_numbers",
    "token": "token_numbers",
}
"""Field of a request that holds the numbers of a level."""


def by_turn_id(extra: ExtraNumbers) -> ExtraNumbers:
    """Return the same numbers, with ids of turns instead of ids of replies."""
    turn_numbers: dict[str, dict[str, float]] = {}
    for name, numbers in extra.turn_numbers.items():
        turn_numbers.setdefault(turn_id_from_response(name), {}).update(numbers)
    token_numbers: dict[str, dict[str, Sequence[float]]] = {}
    for name, columns in extra.token_numbers.items():
        token_numbers.setdefault(turn_id_from_response(name), {}).update(columns)
    return ExtraNumbers(
        numbers=extra.numbers, turn_numbers=turn_numbers, token_numbers=token_numbers
    )


def check_numbers(
    extra: ExtraNumbers,
    declared: Mapping[str, ExtraColumn],
    record: SessionRecord,
    sampled_tokens: Mapping[str, int],
) -> None:
    """Check numbers. `declared` is by name, `sampled_tokens` by turn id, of every turn
    of the session. Raises SessionError 400 for a wrong name, level, length or number,
    404 for a turn that the session does not have. The message names the field, the
    value, the reason and the fix."""
    if extra.numbers and record.parent is not None:
        parent_id = record.top().session.id
        fix = f"send them for session {parent_id}"
        reason = "a child session is a part of its parent's rollout"
        _refuse("numbers", "child_session", f"{sorted(extra.numbers)}: {reason}", fix)
    for name, value in extra.numbers.items():
        field = f"numbers.{name}"
        _check_name(field, name, "rollout", declared)
        _check_value(field, value)
    for turn, turn_numbers in extra.turn_numbers.items():
        _check_turn(f"turn_numbers.{turn}", turn, record, sampled_tokens)
        for name, value in turn_numbers.items():
            field = f"turn_numbers.{turn}.{name}"
            _check_name(field, name, "turn", declared)
            _check_value(field, value)
    for turn, token_numbers in extra.token_numbers.items():
        num_sampled = _check_turn(f"token_numbers.{turn}", turn, record, sampled_tokens)
        for name, values_T in token_numbers.items():
            field = f"token_numbers.{turn}.{name}"
            _check_name(field, name, "token", declared)
            if len(values_T) != num_sampled:
                reason = (
                    f"{len(values_T)} numbers: the turn sampled {num_sampled} tokens"
                )
                fix = "send one number for each sampled token (the answer's usage counts them)"
                _refuse(field, "wrong_length", reason, fix)
            are_numbers_T = np.abs(np.asarray(values_T, np.float64)) <= MAX_NUMBER
            if not are_numbers_T.all():
                first = int(np.argmin(are_numbers_T))
                _check_value(f"{field}.{first}", values_T[first])


def _check_turn(
    field: str, turn: str, record: SessionRecord, sampled_tokens: Mapping[str, int]
) -> int:
    """Return the number of tokens that the turn sampled."""
    num_sampled = sampled_tokens.get(turn_id_from_response(turn))
    if num_sampled is None:
        reason = f"session {record.session.id} has no turn {turn!r}"
        fix = "use the id of one of its answers; turns of a child session belong to that session"
        _refuse(field, "turn_not_found", reason, fix, status=404)
    return num_sampled


def _check_name(
    field: str, name: str, level: Level, declared: Mapping[str, ExtraColumn]
) -> None:
    column = declared.get(name)
    if column is None:
        names = ", ".join(declared) or "none"
        reason = f"the run declares no column {name!r} (declared: {names})"
        _refuse(
            field,
            "unknown_column",
            reason,
            f"start the run with --session.extra-columns {name}:{level}",
        )
    if column.level != level:
        reason = f"the column {name!r} is declared for each {column.level}, not for each {level}"
        fix = f"send it in {_FIELDS[column.level]}, or declare it as {name}:{level}"
        _refuse(field, "wrong_level", reason, fix)


def _check_value(field: str, value: float) -> None:
    if not is_number(value):
        reason = f"{value} is not a finite number within ±{MAX_NUMBER:.6g} (float32)"
        fix = "send a finite number, or leave the name out where there is none: the default counts then"
        _refuse(field, "not_a_number", reason, fix)


def _refuse(
    field: str, code: str, reason: str, fix: str, *, status: int = 400
) -> NoReturn:
    raise SessionError(
        f"{field}: {reason}. Fix: {fix}", status=status, code=code, param=field
    )
