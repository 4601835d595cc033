"""One rollout in full, as the page shows it: the messages of each turn, the reasons for
forks and untrained turns, and the ledger's entries.

The texts are hostile: they are sent unchanged as JSON, and the page never parses them
as markup.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from invrl.buffer.ledger.ledger_store import StoredEntry, ledger_in
from invrl.errors import RunStoreError
from invrl.gateway.types import ADVICE, ForkReason, Message
from invrl.store.rows import StoredSession
from invrl.store.run_store import RunStore
from invrl.types.rollouts import FailedRollout, RolloutSummary
from invrl.types.turns import Turn
from invrl.viewer.fork_explanation import Explanation, explain_forks, kept_reply
from invrl.viewer.turn_tokens import trained_turns
from invrl.viewer.viewed_run import ViewedRun

_MAX_TEXT = 100_000
"""Characters of one text that are sent unless the full text is requested."""
_CHILDREN = """
    WITH RECURSIVE family(id) AS (
        SELECT ?
        UNION ALL
        SELECT child.id FROM family JOIN sessions AS child ON child.parent_id = family.id
        WHERE child.parent_id != ''
    )
    SELECT id, parent_id, state, reward, opened_at FROM sessions
    WHERE id IN family AND parent_id != '' ORDER BY rowid
"""
_TURN_NUMBERS = "SELECT turn_id, name, number FROM numbers WHERE session_id IN (SELECT value FROM json_each(?))"

_TURN_FIELDS = (
    "id",
    "session_id",
    "parent_id",
    "fork_reason",
    "finish_reason",
    "spans",
    "delivered",
    "temperature",
    "cached_tokens",
    "started_at",
    "finished_at",
    "constrained",
)
"""Fields of `Turn` that the page shows as they are."""
_ENTRY_FIELDS = ("state", "reason", "failure", "detail")
"""Fields of `LedgerEntry` that the page shows as they are."""
_UNTRAINED_STATES = {
    "dropped": "the rollout was dropped: {reason}",
    "failed": "the rollout failed: {failure}",
    "lost": "a later incarnation of the run resumed from before it",
    "abandoned": "the run stopped before the rollout ended",
}
"""Reason that a training rollout of this state was not trained; columns of its row in
braces."""

Row = dict[str, Any]


def rollout_detail(run: ViewedRun, session_id: str, *, full: bool) -> Row | None:
    """Return the body `Detail`; None if there is no such rollout. `full`: texts in full
    length. Raises DamagedFileError or RunStoreError if the store cannot be read."""
    with run.queries() as queries:
        row = queries.row(session_id)
        if row is None:
            return None
        group = queries.group_members(row["group_id"], row["purpose"])
    with run.store.reading() as db:
        return _DetailReader(run, db, row, full=full).detail(group)


class _DetailReader:
    def __init__(
        self, run: ViewedRun, db: sqlite3.Connection, row: Row, *, full: bool
    ) -> None:
        self._run = run
        self._db = db
        self._row = row
        self._full = full
        self._store = RunStore.through(db)
        self._notes: list[str] = []
        self._tool_lists: list[list[Row]] = []
        self._tool_numbers: dict[bytes, int] = {}

    def detail(self, group: list[Row]) -> Row | None:
        session_id = self._row["session_id"]
        try:
            session = self._store.session(session_id)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RunStoreError(
                f"the row of {session_id} in the store is damaged: {error}"
            ) from error
        if session is None:
            return None
        summary = _session_summary(session)
        return {
            "row": self._row,
            "detail": session.outcome.detail
            if isinstance(session.outcome, FailedRollout)
            else "",
            "numbers": dict(summary.numbers) if summary else dict(session.numbers),
            "sampling": session.session.sampling,
            "limits": session.session.limits,
            "rewards": _session_rewards(session),
            "ledger": self._ledger(),
            "children": self._children(),
            "group": group,
            "turns": self._turns(session, summary),
            "tool_lists": self._tool_lists,
            "notes": self._notes,
        }

    def _ledger(self) -> list[Row]:
        if self._row["purpose"] != "train":
            return []
        try:
            kept = ledger_in(self._db, group_id=self._row["group_id"])
        except RunStoreError as error:
            self._notes.append(str(error))
            return []
        place = (self._row["index"], self._row["attempt"])
        return [
            _entry_row(entry)
            for entry in kept
            if (entry.entry.place.index, entry.entry.place.attempt) == place
        ]

    def _children(self) -> list[Row]:
        names = ("session_id", "parent_id", "state", "reward", "opened_at")
        rows = self._db.execute(_CHILDREN, (self._row["session_id"],))
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _turns(
        self, session: StoredSession, summary: RolloutSummary | None
    ) -> list[Row]:
        family = self._store.family(self._row["session_id"])
        trained = trained_turns(self._run, self._row, self._notes)
        numbers: dict[str, dict[str, float]] = {}
        for turn_id, name, number in self._db.execute(
            _TURN_NUMBERS, (msgspec.json.encode(family).decode(),)
        ):
            if turn_id:
                numbers.setdefault(turn_id, {})[name] = number
        try:
            recorded = self._store.recorded_turns(*family)
        except (KeyError, ValueError, msgspec.MsgspecError) as error:
            raise RunStoreError(
                f"the turns of {self._row['session_id']} are damaged: {error}"
            ) from error
        explanations = self._explanations(recorded)
        untrained = _below_untrained_roots([turn for turn, _, _ in recorded], summary)
        by_id = {turn.id: turn for turn, _, _ in recorded}
        segments = self._store.turn_segments(*family)
        rows: list[Row] = []
        for turn, messages, tools in recorded:
            row = self._turn_row(turn, messages, tools, explanations.get(turn.id))
            reason = _untrained_reason(
                turn, self._row, in_untrained=turn.id in untrained
            )
            was_trained = False if reason else None
            if trained is not None:
                was_trained = turn.id in trained and bool(
                    trained[turn.id].trained_N.any()
                )
            reward = session.turn_rewards.get(turn.id)
            parent = by_id.get(turn.parent_id or "")
            row |= {
                "kept_reply": kept_reply(parent) if parent else "",
                "trained": was_trained,
                "why_not_trained": "" if was_trained else reason,
                "reward": reward.value if reward else None,
                "numbers": numbers.get(turn.id, {}),
                "segments": segments.get(turn.id, ()),
            }
            rows.append(row)
        return rows

    def _explanations(
        self, recorded: Sequence[tuple[Turn, bytes, bytes]]
    ) -> Mapping[str, Explanation]:
        if not any(turn.fork_reason for turn, _, _ in recorded):
            return {}
        reader = self._run.token_reader()
        decode = reader.decode if reader is not None else None
        explanations: dict[str, Explanation] = {}
        for session_id in dict.fromkeys(turn.session_id for turn, _, _ in recorded):
            of_session = [
                of_turn for of_turn in recorded if of_turn[0].session_id == session_id
            ]
            explanations |= explain_forks(
                of_session,
                self._run.match_level(),
                decode,
                self._store.matched_stops(session_id),
            )
        return explanations

    def _turn_row(
        self, turn: Turn, encoded: bytes, tools: bytes, explanation: Explanation | None
    ) -> Row:
        messages = _decode_messages(encoded, turn.id, self._notes)
        reply = messages[-1] if messages else Message("assistant")
        return {
            **{name: getattr(turn, name) for name in _TURN_FIELDS},
            "fork_advice": explanation.advice
            if explanation
            else fork_advice(turn.fork_reason),
            "fork": explanation.row() if explanation else None,
            "messages": [
                _message_row(message, full=self._full) for message in messages[:-1]
            ],
            "restarts": turn.parent_id is None,
            "reply": _message_row(reply, full=self._full),
            "tools": self._tools_number(tools),
            "context_tokens": len(turn.context_ids_T),
            "sampled_tokens": len(turn.sampled_ids_T),
            "logprob_mean": _mean(turn.logprobs_T),
        }

    def _tools_number(self, tools: bytes) -> int | None:
        """Return the index of the turn's tools in `tool_lists`."""
        number = self._tool_numbers.get(tools)
        if number is not None:
            return number
        try:
            decoded = msgspec.json.decode(tools, type=list[dict[str, Any]])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._notes.append("tools of a turn cannot be read")
            decoded = []
        if not decoded:
            return None
        names = ("name", "description", "parameters")
        self._tool_lists.append(
            [{name: str(tool.get(name, "")) for name in names} for tool in decoded]
        )
        self._tool_numbers[tools] = len(self._tool_lists) - 1
        return self._tool_numbers[tools]


def fork_advice(reason: str) -> str:
    """Return advice about a fork; "" for none, and for a reason that this version does
    not know."""
    if reason not in set(ForkReason):
        return ""
    return ADVICE[ForkReason(reason)]


def _session_summary(session: StoredSession) -> RolloutSummary | None:
    outcome = session.outcome
    if isinstance(outcome, FailedRollout):
        return outcome.partial
    return outcome


def _session_rewards(session: StoredSession) -> list[Row]:
    return [
        {
            "of": of,
            "turn_id": turn_id,
            "reward": reward.value,
            "components": dict(reward.components),
        }
        for of, rewards in (
            ("turn", session.turn_rewards),
            ("branch", session.branch_rewards),
        )
        for turn_id, reward in rewards.items()
    ]


def _entry_row(kept: StoredEntry) -> Row:
    entry = kept.entry
    return {
        **{name: getattr(entry, name) for name in _ENTRY_FIELDS},
        "incarnation": kept.incarnation,
        "at": kept.at,
        "step": None if entry.batch_id is None else entry.batch_id + 1,
        "lost": kept.lost,
    }


def _below_untrained_roots(
    turns: Sequence[Turn], summary: RolloutSummary | None
) -> set[str]:
    """Return the turns of untrained conversations, from their roots down."""
    found: set[str] = set(summary.untrained_roots) if summary else set()
    for turn in turns:  # parents end before their children
        if turn.parent_id in found:
            found.add(turn.id)
    return found


def _untrained_reason(turn: Turn, row: Row, *, in_untrained: bool) -> str:
    """Return the reason; "" if the turn was trained or may still be."""
    if not turn.delivered:
        return "its reply did not reach the agent whole"
    if turn.finish_reason == "abort":
        return "it was cancelled"
    if not turn.trainable:
        return "a grammar forced its tokens, and the trainer does not know the grammar"
    if in_untrained:
        return "its conversation stands beside the main one, and such are not trained"
    if row["purpose"] != "train":
        return "the rollout is not of training"
    return _UNTRAINED_STATES.get(row["state"], "").format_map(row)


def _decode_messages(encoded: bytes, turn_id: str, notes: list[str]) -> list[Message]:
    try:
        return msgspec.json.decode(encoded, type=list[Message])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        notes.append(f"the messages of turn {turn_id} cannot be read: {error}")
        return []


def _message_row(message: Message, *, full: bool) -> Row:
    """Return a message with shortened texts, unless `full`."""
    limit = None if full else _MAX_TEXT
    texts = [
        message.content,
        message.reasoning,
        *(call.arguments for call in message.tool_calls),
    ]
    return {
        "role": message.role,
        "content": message.content[:limit],
        "reasoning": message.reasoning[:limit],
        "tool_calls": [
            {"id": call.id, "name": call.name, "arguments": call.arguments[:limit]}
            for call in message.tool_calls
        ],
        "tool_call_id": message.tool_call_id,
        "instructions": message.instructions,
        "characters": message.characters,
        "cut": limit is not None and any(len(text) > limit for text in texts),
    }


def _mean(logprobs_T: np.ndarray) -> float | None:
    return float(logprobs_T.mean()) if len(logprobs_T) else None
