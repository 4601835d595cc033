"""Counts of the turns of a worker, for its metrics and for the records of its
sessions."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from invrl.gateway.session_record import SessionRecord
from invrl.gateway.turns.generation import Recorded
from invrl.gateway.turns.placement import CONTROL_TOKENS_AS_TEXT, Placement
from invrl.types.turns import Turn

_log = logging.getLogger(__name__)
_MAX_IGNORED_NAMES = 256
"""Maximum number of ignored fields that are counted by name."""


@dataclass(slots=True)
class TurnCounts:
    """Counts since the start of the worker."""

    turns: Counter[str] = field(default_factory=Counter)
    forks: Counter[str] = field(default_factory=Counter)
    """Turns that forked, by reason."""
    matches: Counter[str] = field(default_factory=Counter)
    """Turns that continue another, by the `MatchLevel` at which they match."""
    overridden: Counter[str] = field(default_factory=Counter)
    """Sessions by client requests that the run did not grant: sampling parameters,
    another model."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Requests by fields that the gateway does not know."""

    def add_placement(self, record: SessionRecord, placement: Placement) -> None:
        if placement.fork is not None:
            self.forks[placement.fork.value] += 1
        if (
            CONTROL_TOKENS_AS_TEXT in placement.counts
            and not self.turns[CONTROL_TOKENS_AS_TEXT]
        ):
            _log.info(
                "a message of session %s has the text of a control token, which stays text"
                " (--gateway.special-tokens-in-content control makes it the token; logged once)",
                record.session.id,
            )
        record.counts.update(placement.counts)
        for name, count in placement.counts.items():
            if name.startswith("matches/"):
                self.matches[name.removeprefix("matches/")] += count
            else:
                self.turns[name] += count

    def add_overridden(
        self, record: SessionRecord, names: Sequence[str]
    ) -> tuple[str, ...]:
        """Count overridden parameters and return the names that are new in this
        session."""
        new_names = tuple(name for name in names if name not in record.overridden)
        record.overridden.update(new_names)
        self.overridden.update(new_names)
        return new_names

    def add_ignored(self, record: SessionRecord, names: Sequence[str]) -> None:
        """Count fields of a request that the gateway does not know. Clients choose
        their names, so the number of names is limited."""
        for name in names:
            is_new = name not in self.ignored
            if is_new and len(self.ignored) >= _MAX_IGNORED_NAMES:
                continue
            if is_new:
                _log.info(
                    "%r is ignored: no field that this gateway knows (logged once)",
                    name,
                )
            self.ignored[name] += 1
            record.ignored[name] += 1

    def add_turn(self, turn: Turn, recorded: Recorded) -> None:
        self.turns[turn.finish_reason] += 1
        if recorded.segments:
            self.turns["moved"] += 1
        if recorded.not_moved is not None:
            self.turns[f"not_moved/{recorded.not_moved.value}"] += 1
        self.turns["prompt_tokens"] += turn.prompt_tokens
        self.turns["cached_tokens"] += turn.cached_tokens
        self.turns["sampled_tokens"] += len(turn.sampled_ids_T)

    def metrics(self) -> Mapping[str, Mapping[str, int]]:
        return {
            "turns": dict(self.turns),
            "forks": dict(self.forks),
            "matches": dict(self.matches),
            "overridden": dict(self.overridden),
            "ignored": dict(self.ignored),
        }
