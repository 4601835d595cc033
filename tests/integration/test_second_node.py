"""Runs with a role on the second node of a Ray cluster: two raylets of this machine.
The node with the engine is killed, comes back, and the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from exactly_once import check_exactly_once
from tiny_model import make_tiny_model

from invrl.host.files.temporary_folder import short_folder
from invrl.host.network.ports import free_port
from invrl.host.processes.process import end_processes, process_tree, still_running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
STEPS = 8
WITHIN_S = 900.0
ENGINES = ("--placement.engines", "pool=rollout")


class Cluster:
    """A head, which is the driver's node, and a second node with a label. Each raylet
    is below its own process of `ray start`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_worker_niceness": "0",
            "RAY_enable_metrics_collection": "0",
        }
        self._nodes: list[subprocess.Popen[bytes]] = []
        port = self.address.rpartition(":")[2]
        self._start("a", "--head", "--port", port, "--temp-dir", str(folder / "r"))
        self.until_nodes("a")
        self.second = self.start_second()

    def start_second(self) -> subprocess.Popen[bytes]:
        node = self._start("b", "--address", self.address, "--labels", "pool=rollout")
        self.until_nodes("a", "b")
        return node

    def run(self, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
        environment = {**self.environment, "RAY_ADDRESS": self.address}
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "invrl.cli", *arguments],
                env=environment,
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def until_nodes(self, *names: str) -> None:
        """Wait until these nodes live, by Ray's own list."""
        program = (
            "import ray; ray.init(address='auto', logging_level='ERROR');"
            "print(sorted(n['NodeName'] for n in ray.nodes() if n['Alive']))"
        )
        environment = {**self.environment, "RAY_ADDRESS": self.address}

        def live() -> bool:
            asked = subprocess.run(
                [sys.executable, "-c", program],
                env=environment,
                capture_output=True,
                text=True,
                timeout=WITHIN_S,
            )
            return asked.stdout.strip().endswith(str(sorted(names)))

        until(live, f"nodes {names}", interval_s=2.0)

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *arguments),
            *("--node-name", name, "--num-cpus", "2", "--block"),
            *("--disable-usage-stats", "--object-store-memory", "100000000"),
        ]
        if name == "a":
            command.append("--include-dashboard=false")
        with (self.folder / f"{name}.log").open("ab") as output:
            node = subprocess.Popen(
                command,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._nodes.append(node)
        return node

    def stop(self) -> None:
        family = [process for node in self._nodes for process in process_tree(node.pid)]
        end_processes(family, grace_s=0.0, kill_within_s=60.0)
        for node in self._nodes:
            node.wait(60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with TemporaryDirectory(
        prefix="invrl-two-", dir=short_folder(), ignore_cleanup_errors=True
    ) as folder:
        cluster = Cluster(Path(folder))
        try:
            yield cluster
        finally:
            cluster.stop()


def until(
    condition: Callable[[], bool], awaited: str, *, interval_s: float = 0.5
) -> None:
    give_up_at = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < give_up_at, f"waited {WITHIN_S:g} s for {awaited}"
        time.sleep(interval_s)


def flags(folder: Path) -> list[str]:
    """Of a run on the tiny model in `folder`."""
    return [
        *("--config", str(ROOT / "tests/e2e/trivial.toml")),
        *("--model-path", str(folder / "model"), "--run-root", str(folder)),
        "--num-steps",
        str(STEPS),
        *("--weights.transport", "collective", "--engine.start-timeout-s", "600"),
    ]


def num_steps(run: Path) -> int:
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return 0
    return sum("rollout/reward_mean" in json.loads(line) for line in lines)


def engine_of(node: psutil.Process) -> list[psutil.Process]:
    """The processes of an engine below a node."""
    processes: list[psutil.Process] = []
    for process in node.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            is_named = process.name().startswith("sglang::")
            if is_named or any("launch_sglang" in word for word in process.cmdline()):
                processes.append(process)
    return processes


def test_doctor_asks_both_nodes(cluster: Cluster, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    doctor = cluster.run(
        "doctor", "--cluster", *flags(tmp_path), *ENGINES, log=tmp_path / "doctor"
    )
    printed = tmp_path / "doctor"
    assert doctor.wait(WITHIN_S) == 0, printed.read_text()
    assert "2 nodes, 0 faults" in printed.read_text()


def test_trainer_rank_and_rollout_worker_on_the_second_node_train(
    cluster: Cluster, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path / "model")
    command = cluster.run(
        *("train", *flags(tmp_path), "--placement.trainer", "pool=rollout"),
        *("--placement.rollout-workers", "pool=rollout", "--gateway.host", "0.0.0.0"),
        *("--num-steps", "2", "--run-name", "run"),
        log=tmp_path / "train",
    )
    assert command.wait(WITHIN_S) == 0, (tmp_path / "train").read_text()
    assert num_steps(tmp_path / "run") == 2
    check_exactly_once(tmp_path / "run" / "run.sqlite")


def test_engine_of_a_node_that_is_killed_returns_with_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path / "model")
    run = tmp_path / "run"
    command = cluster.run(
        "train", *flags(tmp_path), *ENGINES, "--run-name", "run", log=tmp_path / "train"
    )
    try:
        until(lambda: num_steps(run) >= 2 or command.poll() is not None, "two steps")
        assert command.poll() is None, (tmp_path / "train").read_text()
        engine = engine_of(psutil.Process(cluster.second.pid))
        assert engine
        assert engine_of(psutil.Process(command.pid)) == []

        family = process_tree(cluster.second.pid)
        [raylet] = [process for process in family if process.name() == "raylet"]
        raylet.kill()
        assert still_running(engine, within_s=60.0) == []
        assert end_processes(family, grace_s=5.0, kill_within_s=60.0) == []
        trained = num_steps(run)
        log = run / "logs" / "driver.log"
        until(lambda: "engine-0 leaves the fleet" in log.read_text(), "the eviction")
        cluster.second = cluster.start_second()
        assert command.wait(WITHIN_S) == 0, (tmp_path / "train").read_text()
    finally:
        if command.poll() is None:
            command.send_signal(signal.SIGINT)
            command.wait(120)
    assert trained < num_steps(run) == STEPS
    assert "engine-0 is back" in log.read_text()
    assert engine_of(psutil.Process(cluster.second.pid)) == []
    check_exactly_once(run / "run.sqlite")
