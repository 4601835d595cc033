"""A run that trains through an environment which it did not start, nor knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from e2e.runs import DEADLINE_S, flags, invrl, steps_of
from invrl.host.ports import free_port
from invrl.store.batch_file import batch_path, load_batch

KEY = "env-of-the-outside-test"


@pytest.mark.timeout(DEADLINE_S)
def test_a_stranger_leases_tasks_and_trains_the_model(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("INVRL_ENV_KEY", KEY)
    port, log, run = free_port(), tmp_path / "outside.jsonl", tmp_path / "run"
    place = [f"http://127.0.0.1:{port}", KEY, str(log)]
    command = [sys.executable, str(Path(__file__).parent / "outside.py"), *place]
    stranger = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": ""})
    try:
        more = [
            "--external-environments",
            "--rollout-function-path",
            "",  # the environment is the agent: no function of ours runs
            "--gateway-port",
            str(port),
            "--num-steps",
            "2",
            "--save-rollout-data",
        ]
        more += ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--lease-timeout-s", "10"]
        out = invrl(tmp_path, "train", *flags(tmp_path, "run"), *more)
        assert stranger.wait(60) == 0, "it was told that the run has ended, and met no closed connection"
    finally:
        stranger.kill()
    assert f":{port}/tasks/lease" in out
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    finished = {one["session_id"]: one for one in lines if "session_id" in one}
    steps = steps_of(run)
    assert len(steps) == 2
    assert steps[-1]["rollout/trained_fraction"] == 1.0
    for step in (1, 2):
        batch = load_batch(batch_path(run / "rollout_data", step))
        for sample in batch.samples:
            assert sample.reward == finished[sample.rollout_id]["reward"]
        assert len({sample.rollout_id for sample in batch.samples}) == 4
        assert len(batch.samples) == 8, "a row for the session and one for its child"
        with_turn = [a for s, a in zip(batch.samples, batch.advantages, strict=True) if len(s.turn_ids) == 2]
        assert any(len(np.unique(row_T[row_T != 0])) == 2 for row_T in with_turn), "a turn's own reward"
    let_go = next(one["let_go"]["group_id"] for one in lines if "let_go" in one)
    assert {one["attempt"] for one in finished.values() if one["group_id"] == let_go} == {1}
    invrl(tmp_path, "ledger", str(run))  # checks that every rollout ended once
