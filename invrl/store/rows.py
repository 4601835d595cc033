"""Sessions and turns as rows of the run's store, in both directions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import msgspec
import numpy as np

from invrl.types import (
    FailedRollout,
    Outcome,
    Reward,
    RolloutSummary,
    Sampling,
    Session,
    SessionLimits,
    Turn,
    VersionSpan,
)

_TURN_FIELDS = tuple(turn_field.name for turn_field in fields(Turn))
_TURN_ARRAYS = {"context_ids_T": np.int32, "sampled_ids_T": np.int32, "logprobs_T": np.float32}
TURN_COLUMNS = ", ".join(name.removesuffix("_T") for name in _TURN_FIELDS)
"""The columns of a turn, in the order of the fields of `Turn`."""
SESSION_COLUMNS = (
    'id, task_id, group_id, "index", attempt, purpose, sampling, limits, parent_id, '
    "key_hash, opened_at, state, reward_deadline, reward, components, outcome"
)


SessionState = Literal["open", "unrewarded", "finished", "aborted", "expired"]
"""`unrewarded`: finished, and waiting for its reward. `expired`: its time was up. (Rows of sessions that were
open when their run ended have the state `lost`. No query reads them.)"""


@dataclass(slots=True, kw_only=True, eq=False)
class StoredSession:
    """All that the store holds of a session apart from its turns. The store has only the hash of the key: in
    what is read from it, `session.key` and the URL are empty. The gateway's record of a live session
    (`gateway/session_record.py`) extends this one."""

    session: Session
    key_hash: bytes
    opened_at: float
    state: SessionState = "open"
    reward_deadline: float | None = None
    """Unix seconds until which a finished session waits for its reward. None: it does not wait."""
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: dict[str, Reward] = field(default_factory=dict)
    """By turn id."""
    branch_rewards: dict[str, Reward] = field(default_factory=dict)
    """By the id of the turn that the branches go through."""
    outcome: Outcome | None = None


def turn_values(turn: Turn) -> tuple[object, ...]:
    """The values of `TURN_COLUMNS`."""
    values: dict[str, object] = {name: getattr(turn, name) for name in _TURN_FIELDS}
    for name, dtype in _TURN_ARRAYS.items():
        values[name] = np.ascontiguousarray(getattr(turn, name), dtype).tobytes()
    values["spans"] = msgspec.json.encode(turn.spans)
    return tuple(values.values())


def turn_from_row(row: Sequence[Any]) -> Turn:
    """`row`: the values of `TURN_COLUMNS`."""
    values: dict[str, Any] = dict(zip(_TURN_FIELDS, row, strict=True))
    for name, dtype in _TURN_ARRAYS.items():
        values[name] = np.frombuffer(values[name], dtype)
    values["spans"] = msgspec.json.decode(values["spans"], type=tuple[VersionSpan, ...])
    values["delivered"] = bool(values["delivered"])
    values["constrained"] = bool(values["constrained"])
    return Turn(**values)


def session_from_row(row: Sequence[Any], reward_rows: Sequence[Sequence[Any]]) -> StoredSession:
    """`row`: the values of `SESSION_COLUMNS`. `reward_rows`: `of`, `turn_id`, `reward` and `components` of
    the session's rows in the table `rewards`."""
    *place, sampling, limits, parent_id, key_hash, opened_at, state, due, reward, components, outcome = row
    session_id, task_id, group_id, index, attempt, purpose = place
    turn_rewards: dict[str, Reward] = {}
    branch_rewards: dict[str, Reward] = {}
    for of, turn_id, value, parts in reward_rows:
        if of == "turn":
            turn_rewards[turn_id] = Reward(value=value, components=_components(parts), turn=turn_id)
        else:
            branch_rewards[turn_id] = Reward(value=value, components=_components(parts), branch=turn_id)
    session = Session(
        id=session_id,
        key="",
        base_url="",
        task_id=task_id,
        group_id=group_id,
        index=index,
        attempt=attempt,
        purpose=purpose,
        sampling=msgspec.json.decode(sampling, type=Sampling),
        limits=msgspec.json.decode(limits, type=SessionLimits),
        parent_id=parent_id,
    )
    return StoredSession(
        session=session,
        key_hash=key_hash,
        opened_at=opened_at,
        state=state,
        reward_deadline=due,
        reward=reward,
        components=_components(components),
        turn_rewards=turn_rewards,
        branch_rewards=branch_rewards,
        outcome=None if outcome is None else outcome_from_json(outcome),
    )


def outcome_from_json(body: bytes) -> Outcome:
    try:
        return msgspec.json.decode(body, type=RolloutSummary)
    except msgspec.ValidationError:
        return msgspec.json.decode(body, type=FailedRollout)


def _components(body: bytes | None) -> dict[str, float]:
    if not body:
        return {}
    return msgspec.json.decode(body, type=dict[str, float])
