"""Every role of a real run is killed once (-9), every phase of the loop is hit: nothing is lost, nothing is
trained twice. `tests/soak.py` does the same at random for as long as it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from soak import ROLES, Soak, check_run

from e2e.runs import flags, invrl
from invrl.store.run_folder import RunFolder

DEADLINE_S = 1800
FAULTS = {
    "worker": "rollout",
    "engine": "sync",
    "trainer": "train",
    "router": "rollout",
    "gateway": "train",
    "buffer": "sync",
    "driver": "checkpoint",
    "raylet": "rollout",
    "gcs": "train",
    "supervisor": "sync",
}


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Soak]:
    more = ["--num-steps", "100000", "--save-interval", "2", "--max-restarts", "3", "--max-staleness", "1"]
    soak = Soak(RunFolder(path=folder / "faults"), [*flags(folder, "faults"), *more])
    soak.start()
    yield soak
    soak.stop()


@pytest.mark.timeout(DEADLINE_S)
def test_every_role_is_named() -> None:
    assert FAULTS.keys() == ROLES.keys()


@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("role", FAULTS)
def test_the_run_trains_on(run: Soak, role: str) -> None:
    fault = run.inflict(role, FAULTS[role])
    recovers = ("worker", "gateway", "router")
    outcomes = {"supervisor": "resumed", **dict.fromkeys(recovers, "recovered")}
    expected = outcomes.get(role, "restarted")
    assert fault.outcome == expected


@pytest.mark.timeout(DEADLINE_S)
def test_then_nothing_was_lost_or_trained_twice(run: Soak, folder: Path) -> None:
    steps = run.finish()
    counts = check_run(RunFolder(path=folder / "faults"), steps)
    assert counts["rollouts_trained"] == steps * 32
    assert counts["incarnations"] == 9  # the first, one after each of seven faults, the last one
    assert "ends once: yes" in invrl(folder, "ledger", str(folder / "faults"))
    place = str(folder / "faults")
    left = [p.info for p in psutil.process_iter(["pid", "cmdline"]) if place in str(p.info["cmdline"])]
    assert not left
