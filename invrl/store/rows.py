"""Sessions and turns as rows of the run's store, in both directions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import msgspec
import numpy as np

from invrl.store.row_checksums import row_checksum
from invrl.types.rollouts import FailedRollout, Outcome, RolloutSummary
from invrl.types.routed_experts import RoutedExperts
from invrl.types.sessions import Reward, Sampling, Session, SessionLimits
from invrl.types.top_logprobs import TopLogprobs
from invrl.types.turns import Turn, VersionSpan

_TURN_FIELDS = tuple(turn_field.name for turn_field in fields(Turn))
_TURN_ARRAYS = {
    "context_ids_T": np.int32,
    "sampled_ids_T": np.int32,
    "logprobs_T": np.float32,
}
TURN_COLUMNS = ", ".join(name.removesuffix("_T") for name in _TURN_FIELDS)
"""Columns of a turn, in the order of the fields of `Turn`."""
EXPERTS_COLUMNS = "turn_id, bytes_each, layers, chosen, experts"
"""Columns of the experts that computed a turn's tokens."""
TOP_COLUMNS = "turn_id, width, ids, logprobs"
"""Columns of the likeliest tokens at a turn's sampled ones."""
_SESSION_FIELDS = (
    "id",
    "task_id",
    "group_id",
    "index",
    "attempt",
    "purpose",
    "sampling",
    "limits",
    "parent_id",
)
"""Stored fields of `Session`; the key and the URL are not."""
_OPENED_FIELDS = (*_SESSION_FIELDS, "opened_at", "state")
OPENED_COLUMNS = ", ".join(f'"{name}"' for name in _OPENED_FIELDS)
"""Columns known when a session is opened, apart from the hash of its key."""
_RECORD_FIELDS = ("key_hash", "opened_at", "state", "reward", "components", "outcome")
SESSION_COLUMNS = ", ".join(f'"{name}"' for name in (*_SESSION_FIELDS, *_RECORD_FIELDS))
"""All columns of a session, its id first."""

SessionState = Literal["open", "unrewarded", "finished", "aborted", "expired"]
"""`unrewarded`: finished, and waiting for its reward. `expired`: its time was up. (Rows
of sessions that were open when their run ended have the state `lost`. No query reads
them.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardDeadline:
    """Deadline of a finished session's reward."""

    awake_s: float
    """Lived time of its gateway worker; this is what counts."""
    unix_s: float
    """Time that its environment was told."""


@dataclass(slots=True, kw_only=True, eq=False)
class StoredSession:
    """Everything that the store holds of a session apart from its turns. The store has
    only the hash of the key: when read from it, `session.key` and the URL are empty.
    The gateway's record of a live session (`gateway/session_record.py`) extends this
    one."""

    session: Session
    key_hash: bytes
    opened_at: float
    """Unix seconds."""
    awake_at_opening: float = 0.0
    """Lived seconds of its gateway worker. Read from the store for live sessions
    only."""
    state: SessionState = "open"
    reward_deadline: RewardDeadline | None = None
    """None: it does not wait for a reward. Read from the store for live sessions
    only."""
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: dict[str, Reward] = field(default_factory=dict)
    branch_rewards: dict[str, Reward] = field(default_factory=dict)
    """Rewards by the id of the turn that the trajectories go through."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Numbers by the name of the rollout-level extra column."""
    turn_numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    """Numbers by turn id, then by name."""
    outcome: Outcome | None = None


def turn_values(turn: Turn) -> tuple[object, ...]:
    """Return the values of `TURN_COLUMNS`."""
    values: dict[str, object] = {name: getattr(turn, name) for name in _TURN_FIELDS}
    for name, dtype in _TURN_ARRAYS.items():
        values[name] = np.ascontiguousarray(getattr(turn, name), dtype).tobytes()
    values["spans"] = msgspec.json.encode(turn.spans)
    values["constrained"] = int(turn.constrained)
    return tuple(values.values())


def turn_checksum(row: Sequence[Any], messages: bytes, tools_digest: bytes) -> bytes:
    """Hash all of a turn but its mark of delivery, which changes. `row` has the values
    of `TURN_COLUMNS`."""
    fixed = [
        value
        for name, value in zip(_TURN_FIELDS, row, strict=True)
        if name != "delivered"
    ]
    return row_checksum(*fixed, messages, tools_digest)


def turn_from_row(row: Sequence[Any]) -> Turn:
    """Build a turn from the values of `TURN_COLUMNS`."""
    values: dict[str, Any] = dict(zip(_TURN_FIELDS, row, strict=True))
    for name, dtype in _TURN_ARRAYS.items():
        values[name] = np.frombuffer(values[name], dtype)
    values["spans"] = msgspec.json.decode(values["spans"], type=tuple[VersionSpan, ...])
    values["delivered"] = bool(values["delivered"])
    values["constrained"] = bool(values["constrained"])
    return Turn(**values)


def experts_values(turn_id: str, experts_TLK: RoutedExperts) -> tuple[object, ...]:
    """Return the values of `EXPERTS_COLUMNS`."""
    _, layers, chosen = experts_TLK.shape
    return (turn_id, experts_TLK.itemsize, layers, chosen, experts_TLK.tobytes())


def experts_from_row(row: Sequence[Any]) -> RoutedExperts:
    """Build the experts from the values of `EXPERTS_COLUMNS`."""
    _, bytes_each, layers, chosen, content = row
    return np.frombuffer(content, f"u{bytes_each}").reshape(-1, layers, chosen)


def top_values(turn_id: str, top: TopLogprobs) -> tuple[object, ...]:
    """Return the values of `TOP_COLUMNS`."""
    width = top.ids_TK.shape[1]
    ids_TK = np.ascontiguousarray(top.ids_TK, np.int32)
    logprobs_TK = np.ascontiguousarray(top.logprobs_TK, np.float32)
    return (turn_id, width, ids_TK.tobytes(), logprobs_TK.tobytes())


def top_from_row(row: Sequence[Any]) -> TopLogprobs:
    """Build the likeliest tokens from the values of `TOP_COLUMNS`."""
    _, width, ids, logprobs = row
    return TopLogprobs(
        ids_TK=np.frombuffer(ids, np.int32).reshape(-1, width),
        logprobs_TK=np.frombuffer(logprobs, np.float32).reshape(-1, width),
    )


def opened_values(record: StoredSession) -> tuple[object, ...]:
    """Return the values of `OPENED_COLUMNS`."""
    session = record.session
    values: dict[str, object] = {
        name: getattr(session, name) for name in _SESSION_FIELDS
    }
    values["sampling"] = msgspec.json.encode(session.sampling)
    values["limits"] = msgspec.json.encode(session.limits)
    return (*values.values(), record.opened_at, record.state)


def session_from_row(
    row: Sequence[Any],
    reward_rows: Sequence[Sequence[Any]],
    number_rows: Sequence[tuple[str, str, float]] = (),
) -> StoredSession:
    """Build a session from the values of `SESSION_COLUMNS`, the columns `of`,
    `turn_id`, `reward` and `components` of its rows in the table `rewards`, and
    `turn_id`, `name` and `number` of its rows in the table `numbers`."""
    rewards: dict[str, dict[str, Reward]] = {"turn": {}, "branch": {}}
    for of, turn_id, value, parts in reward_rows:
        rewards[of][turn_id] = Reward(
            value=value, components=_components(parts), **{of: turn_id}
        )
    numbers: dict[str, float] = {}
    turn_numbers: dict[str, dict[str, float]] = {}
    for turn_id, name, number in number_rows:
        if turn_id:
            turn_numbers.setdefault(turn_id, {})[name] = number
        else:
            numbers[name] = number
    values = iter(row)
    of_session: dict[str, Any] = dict(zip(_SESSION_FIELDS, values, strict=False))
    of_record: dict[str, Any] = dict(zip(_RECORD_FIELDS, values, strict=True))
    of_session["sampling"] = msgspec.json.decode(of_session["sampling"], type=Sampling)
    of_session["limits"] = msgspec.json.decode(of_session["limits"], type=SessionLimits)
    of_record["components"] = _components(of_record["components"])
    if of_record["outcome"] is not None:
        of_record["outcome"] = outcome_from_json(of_record["outcome"])
    return StoredSession(
        session=Session(**of_session, key="", base_url=""),
        turn_rewards=rewards["turn"],
        branch_rewards=rewards["branch"],
        numbers=numbers,
        turn_numbers=turn_numbers,
        **of_record,
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
