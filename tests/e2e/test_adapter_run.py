"""A whole run that trains an adapter and sends it alone: it learns, pauses no engine,
and records each token with the version of the adapter that made it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_folders import PREFIX, merged
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from e2e.runs import DEADLINE_S, STEPS, steps_of, train

RANK = 4
ALPHA = 32.0
ADAPTER = (
    *("--lora.rank", str(RANK), "--lr", "5e-3"),
    *("--weights.transport", "adapter"),
)


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


def adapted_model(base: Path, adapter: Path) -> torch.nn.Module:
    """Return transformers' model with the adapter of a checkpoint merged into it."""
    factors = {
        name.removeprefix(PREFIX): factor
        for name, factor in load_file(adapter / "adapter_model.safetensors").items()
    }
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    weights = merged(base, factors, ALPHA / RANK)
    state = {name: torch.from_numpy(weight) for name, weight in weights.items()}
    model.load_state_dict(state, strict=False)
    return model.eval()


def logprobs(model: torch.nn.Module, turn: RecordedTurn) -> NDArray[np.float32]:
    """Return the log-probs of the turn's sampled tokens."""
    ids_T = torch.tensor(turn.prompt + turn.sampled)
    with torch.no_grad():
        logits_TV = model(ids_T[None]).logits[0].log_softmax(-1)
    predicted_TV = logits_TV[len(turn.prompt) - 1 : -1]
    return predicted_TV.gather(1, ids_T[len(turn.prompt) :, None])[:, 0].numpy()


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_an_adapter_is_trained_and_updated_without_a_pause(folder: Path) -> None:
    """Two engines and a staleness of 1: requests run while engines load the next
    version. Each recorded log-prob is that of the adapter which its version names."""
    run = train(
        folder,
        "adapter",
        *ADAPTER,
        *("--max-staleness", "1", "--num-engines", "2"),
        *("--save-interval", "1", "--no-checkpoints.keep"),
    )
    steps = steps_of(run)
    assert len(steps) == STEPS
    rewards = [step["rollout/reward_mean"] for step in steps]
    assert sum(rewards[-4:]) - sum(rewards[:4]) > 4 * 0.1, "it does not learn"
    assert [step["sync/paused_s"] for step in steps] == [0.0] * STEPS
    turns = recorded_turns(run)
    assert all(len(turn.versions) == len(turn.sampled) > 0 for turn in turns)
    assert all(len(set(turn.versions)) == 1 for turn in turns), "a version was left"
    found = {turn.versions[0] for turn in turns}
    assert set(range(STEPS)) <= found
    for version in sorted(found - {0}):
        adapter = run / f"checkpoints/step-{version:06}/hugging_face"
        model = adapted_model(folder / "model", adapter)
        for turn in turns:
            if turn.versions[0] == version:
                gap_T = np.abs(logprobs(model, turn) - turn.logprobs_T)
                assert gap_T.max() < 1e-3, (version, gap_T.max())
