"""The tokens of a turn, as the page shows them: their texts, the numbers of engine and
trainer, and the likeliest tokens in the place of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from invrl.errors import RunStoreError
from invrl.store.run_store import RunStore
from invrl.store.trained_tokens import TrainedTurn, read_trained_tokens, recorded_steps
from invrl.types.top_logprobs import NO_TOKEN, TopLogprobs
from invrl.types.turns import Turn
from invrl.viewer.viewed_run import ViewedRun

if TYPE_CHECKING:
    from invrl.store.tokenizer_folder import TokenReader

_MAX_CONTEXT = 4_000
"""Context ids of one turn that are sent unless all are requested."""
_MAX_CANDIDATES = 20
"""Likeliest tokens that are sent for each sampled one."""

Row = dict[str, Any]


def turn_tokens(run: ViewedRun, turn_id: str, *, full: bool) -> Row | None:
    """Return the tokens of a turn with their numbers; None if there is no such turn.
    Raises DamagedFileError or RunStoreError if the store cannot be read."""
    notes: list[str] = []
    with run.store.reading() as db:
        found = db.execute(
            "SELECT session_id FROM turns WHERE id=?", (turn_id,)
        ).fetchone()
        if found is None:
            return None
        session_id = found[0]
        store = RunStore.through(db)
        turn = next(turn for turn in store.turns(session_id) if turn.id == turn_id)
        top = _top_logprobs(store, turn, notes)
        sql = "SELECT name, numbers FROM token_numbers WHERE turn_id=?"
        numbers = {
            name: np.frombuffer(body, np.float32).tolist()
            for name, body in db.execute(sql, (turn_id,))
        }
    with run.queries() as queries:
        row = queries.row(session_id)
    start = 0
    if not full:
        start = max(0, len(turn.context_ids_T) - _MAX_CONTEXT)
    context_ids = turn.context_ids_T[start:].tolist()
    sampled_ids = turn.sampled_ids_T.tolist()
    reader = run.token_reader()
    if reader is None:
        notes.append(
            "no text of tokens: neither the run folder nor its model's folder has a tokenizer"
        )
    sampled: Row = {
        "ids": sampled_ids,
        "texts": reader.texts(sampled_ids) if reader else None,
        "logprobs": turn.logprobs_T.tolist(),
        "versions": turn.versions_T.tolist(),
        "trained": None,
        "advantages": None,
        "trainer_logprobs": None,
        "candidates": None,
        "numbers": numbers,
    }
    if top is not None:
        sampled["candidates"] = _candidates(top, reader)
    trained = trained_turns(run, row, notes) if row else None
    if trained is not None:
        sampled |= _trained_values(trained.get(turn_id), len(sampled_ids), notes)
    return {
        "turn_id": turn.id,
        "session_id": session_id,
        "step": row["step"] if row else None,
        "context": {
            "total": len(turn.context_ids_T),
            "start": start,
            "ids": context_ids,
            "texts": reader.texts(context_ids) if reader else None,
        },
        "sampled": sampled,
        "notes": notes,
    }


def _top_logprobs(store: RunStore, turn: Turn, notes: list[str]) -> TopLogprobs | None:
    """Return the likeliest tokens for each sampled one; None if they were not
    recorded."""
    try:
        top = store.top_logprobs(turn.id)
    except ValueError as error:
        notes.append(f"the likeliest tokens of the turn cannot be read: {error}")
        return None
    if top is not None and len(top) != len(turn.sampled_ids_T):
        notes.append(
            "the record of the likeliest tokens has another number of tokens than the turn"
        )
        return None
    return top


def _candidates(top: TopLogprobs, reader: TokenReader | None) -> Row:
    """Return `ids` and `logprobs` of each position, the likeliest first, and the texts
    of the ids. `recorded` and `shown`: numbers per position that the run recorded, and
    that are returned at most."""
    recorded = top.ids_TK.shape[1]
    shown = min(recorded, _MAX_CANDIDATES)
    ids: list[list[int]] = []
    logprobs: list[list[float]] = []
    for ids_K, logprobs_K in zip(
        top.ids_TK[:, :shown], top.logprobs_TK[:, :shown], strict=True
    ):
        is_token_K = ids_K != NO_TOKEN
        ids.append(ids_K[is_token_K].tolist())
        logprobs.append(logprobs_K[is_token_K].tolist())
    texts = None
    if reader is not None:
        different = sorted({token_id for of_place in ids for token_id in of_place})
        texts = dict(zip(map(str, different), reader.texts(different), strict=True))
    return {
        "ids": ids,
        "logprobs": logprobs,
        "texts": texts,
        "recorded": recorded,
        "shown": shown,
    }


def trained_turns(
    run: ViewedRun, row: Row, notes: list[str]
) -> Mapping[str, TrainedTurn] | None:
    """Return what the step of a rollout trained, by turn; None if that was not
    recorded. `notes` receives the errors of unreadable files."""
    folder = run.folder.trained_tokens_path
    step = row["step"]
    if row["purpose"] != "train" or row["state"] != "trained" or step is None:
        return None
    try:
        if step not in recorded_steps(folder):
            return None
        return read_trained_tokens(folder, step)
    except (RunStoreError, OSError) as error:
        notes.append(str(error))
        return None


def _trained_values(turn: TrainedTurn | None, length: int, notes: list[str]) -> Row:
    if turn is None:  # the step is recorded and did not train this turn
        return {
            "trained": [False] * length,
            "advantages": [0.0] * length,
            "trainer_logprobs": None,
        }
    if len(turn.trained_N) != length:
        notes.append(
            "the record of what was trained has another number of tokens than the turn"
        )
        return {}
    return {
        "trained": turn.trained_N.tolist(),
        "advantages": turn.advantages_N.tolist(),
        "trainer_logprobs": turn.logprobs_N.tolist(),
    }
