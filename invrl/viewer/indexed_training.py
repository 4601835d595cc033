"""Training results of the rollouts' tokens in the index: advantages, and gaps of engine
and trainer."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from invrl.errors import RunStoreError
from invrl.store.trained_tokens import (
    TrainedTurn,
    read_trained_tokens,
    recorded_steps,
    tokens_path,
)
from invrl.viewer.index_file import meta_number, session_rollout, set_meta


class IndexedTraining:
    """Reads from `store` and `folder`, that of `store/trained_tokens.py`, and writes to
    `index`, within the caller's transactions."""

    def __init__(
        self, store: sqlite3.Connection, index: sqlite3.Connection, folder: Path
    ) -> None:
        self._store = store
        self._index = index
        self._folder = folder

    def read(self) -> bool:
        """Read the advantages and the trainer's log-probs of one new step."""
        try:
            written = self._folder.stat().st_mtime_ns
        except OSError:
            return False
        if written == meta_number(self._index, "tokens_written"):
            return False
        for step in recorded_steps(self._folder):
            key = f"tokens_of_step_{step}"
            changed = tokens_path(self._folder, step).stat().st_mtime_ns
            if changed == meta_number(self._index, key):
                continue
            set_meta(self._index, key, changed)
            self._add_step(step)
            return True
        set_meta(self._index, "tokens_written", written)
        return False

    def _add_step(self, step: int) -> None:
        """Add a step. A damaged file counts as none: the page of a token reports its
        error."""
        try:
            turns = read_trained_tokens(self._folder, step)
        except RunStoreError:
            return
        sums: dict[int, NDArray[np.float64]] = {}
        sql = "SELECT id, session_id, logprobs FROM turns WHERE id IN (SELECT value FROM json_each(?))"
        for turn_id, session_id, logprobs in self._store.execute(
            sql, (json.dumps(list(turns)),)
        ):
            rollout = session_rollout(self._index, session_id)
            engine_N = np.frombuffer(logprobs, np.float32)
            if rollout is None or len(engine_N) != len(turns[turn_id].trained_N):
                continue
            sums[rollout] = sums.get(rollout, np.zeros(4)) + _sums(
                turns[turn_id], engine_N
            )
        values = [
            (_share(advantages, tokens), _share(gaps, compared), rollout)
            for rollout, (advantages, tokens, gaps, compared) in sums.items()
        ]
        self._index.executemany(
            "UPDATE rollouts SET advantage=?, gap=? WHERE id=?", values
        )


def _sums(turn: TrainedTurn, engine_N: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return sum and number of the advantages of trained tokens, and of the gaps
    between engine and trainer."""
    gaps_N = np.abs(engine_N.astype(np.float64) - turn.logprobs_N)
    compared_N = turn.trained_N & np.isfinite(gaps_N)
    advantages_N = turn.advantages_N.astype(np.float64)
    return np.array(
        [
            advantages_N[turn.trained_N].sum(),
            turn.trained_N.sum(),
            gaps_N[compared_N].sum(),
            compared_N.sum(),
        ]
    )


def _share(total: float, count: float) -> float | None:
    if not count:
        return None
    return float(total / count)
