"""Every role of a real run is killed once (-9), every phase of the loop is hit: nothing
is lost, nothing is trained twice. `tests/soak.py` does the same at random for as long
as it is told to. Before that, strangers meet the same run: one who may read the run
folder, and one who may not."""

from __future__ import annotations

import contextlib
import pickle
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
import zmq
from soak import ROLES, Soak, check_run

from e2e.runs import flags, invrl
from e2e.unauthorized_client import Stranger, listening_ports
from invrl.buffer.ledger.ledger_store import read_incarnations
from invrl.store.run_folder import RunFolder

DEADLINE_S = 1800
ADDRESS = ("127.0.0.1", 0)
FAULTS = {
    "worker": "rollout",
    "engine": "sync",
    "fork parent": "sync",
    "trainer": "train",
    "router": "rollout",
    "gateway": "train",
    "buffer": "sync",
    "driver": "checkpoint",
    "raylet": "rollout",
    "gcs": "train",
    "supervisor": "sync",
}
RAY_ROLES = ("raylet", "gcs")


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Soak]:
    more = [
        "--num-steps",
        "100000",
        "--save-interval",
        "2",
        "--max-restarts",
        "3",
        "--max-staleness",
        "1",
        # Short steps: most of the time goes to waiting for the next one.
        *("--rollout-batch-size", "2", "--n-samples-per-prompt", "4"),
    ]
    soak = Soak(RunFolder(path=folder / "faults"), [*flags(folder, "faults"), *more])
    soak.start()
    yield soak
    soak.stop()


@pytest.mark.timeout(DEADLINE_S)
def test_every_role_has_a_fault() -> None:
    assert FAULTS.keys() == ROLES.keys()


@pytest.mark.timeout(DEADLINE_S)
def test_verify_weights_command_checks_the_engine_of_a_live_run(
    run: Soak, folder: Path
) -> None:
    run.train_on()
    (line,) = invrl(folder, "verify-weights", str(folder / "faults")).splitlines()
    assert line.startswith("engine-0: version ")
    assert "equal to what was committed" in line


@pytest.mark.timeout(DEADLINE_S)
def test_bytes_of_a_stranger_are_neither_executed_nor_stored_at_any_port(
    run: Soak, folder: Path, tmp_path: Path
) -> None:
    run.train_on()
    ports = listening_ports(psutil.Process(run.pid))
    assert len(ports) > len(ROLES)
    stranger = Stranger(folder=tmp_path, mark=f"stranger-{uuid.uuid4().hex}")
    assert stranger.attack(list(ports)) == []
    run.train_on()
    assert not stranger.was_executed
    assert len(read_incarnations(RunFolder(path=folder / "faults").store_path)) == 1, (
        "it ended nothing"
    )
    files = [path for path in (folder / "faults").rglob("*") if path.is_file()]
    assert not [path for path in files if stranger.mark.encode() in path.read_bytes()]


def test_attack_finds_servers_that_execute_what_strangers_send(tmp_path: Path) -> None:
    stranger = Stranger(folder=tmp_path, mark="mark")
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as trusting,
        HTTPServer(ADDRESS, Trusting) as web,
    ):
        port = trusting.bind_to_random_port("tcp://127.0.0.1")
        threading.Thread(target=web.serve_forever, daemon=True).start()
        accepted = stranger.attack([port, web.server_port])
        trusting.setsockopt(zmq.RCVTIMEO, 30_000)
        while not stranger.was_executed:
            message = trusting.recv()
            with contextlib.suppress(pickle.UnpicklingError, EOFError):
                pickle.loads(message)
        web.shutdown()
    assert f"port {web.server_port} answered POST /workers with 200: mark" in accepted


class Trusting(BaseHTTPRequestHandler):
    """Answers every POST with 200."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"mark")

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize(
    "role",
    [
        # The run starts again after the death of one of Ray's processes, as after the
        # driver's.
        pytest.param(role, marks=pytest.mark.slow if role in RAY_ROLES else ())
        for role in FAULTS
        if role != "supervisor"
    ],
)
def test_run_keeps_training_after_the_death_of_a_role(run: Soak, role: str) -> None:
    fault = run.inflict(role, FAULTS[role])
    recovers = ("worker", "engine", "gateway", "router", "fork parent")
    assert fault.outcome == ("recovered" if role in recovers else "restarted")


@pytest.mark.timeout(DEADLINE_S)
def test_repeated_command_of_a_dead_supervisor_trains_on_and_after_all_faults_no_rollout_is_lost_or_trained_twice(
    run: Soak, folder: Path
) -> None:
    steps = run.last_step() + 6
    last_step = ("--num-steps", str(steps))
    fault = run.inflict("supervisor", FAULTS["supervisor"], repeated_with=last_step)
    assert fault.outcome == "resumed"
    run.wait_for_end()
    counts = check_run(RunFolder(path=folder / "faults"), steps)
    assert counts["rollouts_trained"] == steps * 8
    # The first, and one after each fault that no process recovers from.
    restarts = [fault for fault in run.faults if fault.outcome != "recovered"]
    assert counts["incarnations"] == 1 + len(restarts)
    assert "ends once: yes" in invrl(folder, "ledger", str(folder / "faults"))
    place = str(folder / "faults")
    left = [
        p.info
        for p in psutil.process_iter(["pid", "cmdline"])
        if place in str(p.info["cmdline"])
    ]
    assert not left
