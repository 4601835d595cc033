"""Recorded turns, and what transformers computes for their tokens."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """A turn as the store has it, read with sqlite alone."""

    prompt: list[int]
    sampled: list[int]
    logprobs_T: NDArray[np.float32]
    versions: list[int]


def recorded_turns(run: Path) -> list[RecordedTurn]:
    query = (
        "SELECT id, parent_id, context_ids, sampled_ids, logprobs, spans FROM turns "
        "ORDER BY seq"
    )
    with closing(sqlite3.connect(run / "run.sqlite")) as db:
        rows = db.execute(query).fetchall()
    turns: dict[str, RecordedTurn] = {}
    for turn_id, parent_id, context_ids, sampled_ids, logprobs, spans in rows:
        prompt: list[int] = []
        if parent_id is not None:
            parent = turns[parent_id]
            prompt = parent.prompt + parent.sampled
        versions: list[int] = []
        for span in json.loads(spans):
            assert span["start"] == len(versions)
            versions += [int(span["version"])] * (span["end"] - span["start"])
        turns[turn_id] = RecordedTurn(
            prompt=prompt + np.frombuffer(context_ids, np.int32).tolist(),
            sampled=np.frombuffer(sampled_ids, np.int32).tolist(),
            logprobs_T=np.frombuffer(logprobs, np.float32),
            versions=versions,
        )
    return list(turns.values())


def logprobs(model: torch.nn.Module, turn: RecordedTurn) -> NDArray[np.float32]:
    """Return the log-probs of the turn's sampled tokens."""
    ids_T = torch.tensor(turn.prompt + turn.sampled)
    with torch.no_grad():
        logits_TV = model(ids_T[None]).logits[0].log_softmax(-1)
    predicted_TV = logits_TV[len(turn.prompt) - 1 : -1]
    return predicted_TV.gather(1, ids_T[len(turn.prompt) :, None])[:, 0].numpy()
