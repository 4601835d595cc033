"""A start on a busy machine is waited for, and says what it waits for."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from invrl.errors import ConfigError, ServerError
from invrl.host.output.wait_lines import overload, print_waits
from invrl.run.processes import ray_session


def test_lines_say_what_is_awaited_until_it_is_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = ["engines", "trainer"]
    printed = ""
    give_up_at = time.monotonic() + 60
    with print_waits(lambda: ", ".join(parts), interval_s=0.01):
        while "waiting for trainer" not in printed:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
            printed += capsys.readouterr().out
            if "waiting for engines, trainer" in printed:
                parts[:] = ["trainer"]
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().out == ""


def test_nothing_is_said_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with print_waits(lambda: "", interval_s=0.001):
        time.sleep(0.05)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (2.9, ""),
        (9.24, "the machine is overloaded: load 9.2 on 2 cores"),
    ],
)
def test_an_overloaded_machine_is_called_so(
    monkeypatch: pytest.MonkeyPatch, load: float, text: str
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert overload() == (f"; {text}" if text else "")


class LateRaylet:
    """Ray's look-up of its own node, which finds nothing `misses` times."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, misses: int, lives: bool
    ) -> None:
        self.misses = misses
        self.services = ray._private.services  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setattr(self.services, "get_node", self.get_node)
        monkeypatch.setattr(ray_session, "_raylet_is_alive", lambda: lives)
        monkeypatch.setattr(ray_session, "_RAYLET_POLL_S", 0.0)

    def get_node(self, gcs_address: str, node_id: str) -> dict[str, str]:
        if self.misses:
            self.misses -= 1
            raise RuntimeError("no such node")
        return {"node_id": node_id}


def test_a_raylet_that_lives_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateRaylet(monkeypatch, misses=5, lives=True)
    with ray_session._raylet_timeout(600.0):
        assert late.services.get_node("127.0.0.1:1", "a") == {"node_id": "a"}
    assert late.services.get_node == late.get_node, "Ray is as it was"


@pytest.mark.parametrize(
    ("lives", "deadline_s"),
    [
        (False, 600.0),
        (True, 0.0),
    ],
)
def test_neither_a_dead_raylet_nor_one_without_end_is(
    monkeypatch: pytest.MonkeyPatch, lives: bool, deadline_s: float
) -> None:
    late = LateRaylet(monkeypatch, misses=5, lives=lives)
    with (
        ray_session._raylet_timeout(deadline_s),
        pytest.raises(RuntimeError, match="no such node"),
    ):
        late.services.get_node("127.0.0.1:1", "a")


def test_a_start_that_fails_on_an_overloaded_machine_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("timed out.\nlogs of Ray")

    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    monkeypatch.setattr(
        ray_session, "ray", SimpleNamespace(init=fail, shutdown=lambda: None)
    )
    with pytest.raises(
        ServerError,
        match=r"did not start: timed out; the machine is overloaded: load 1000",
    ):
        ray_session._init_ray()


def test_a_client_of_a_ray_of_several_nodes_is_refused() -> None:
    living = {"Alive": True}
    dead = {"Alive": False}
    ray_session.refuse_remote_driver("10.0.0.1:6379", [living, dead, living])
    ray_session.refuse_remote_driver("ray://10.0.0.1:10001", [living, dead])
    with pytest.raises(ConfigError, match="this Ray has 2 nodes") as refusal:
        ray_session.refuse_remote_driver("ray://10.0.0.1:10001", [living, living])
    assert refusal.value.field == "RAY_ADDRESS"


class FailingStarts:
    """`ray.init` fails so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, times: int) -> None:
        self.times = times
        self.num_starts = 0
        monkeypatch.setattr(ray_session, "_init_ray", self.start)
        monkeypatch.setattr(ray_session, "_shut_ray_down", lambda **_: None)

    def start(self, **_: object) -> None:
        self.num_starts += 1
        if self.num_starts <= self.times:
            raise ServerError("Ray did not start") from RuntimeError("no agent")


@pytest.mark.parametrize(("load", "num_starts"), [(0.5, 4), (19.0, 6)])
def test_failed_start_is_repeated_as_long_as_the_machine_is_overloaded(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    load: float,
    num_starts: int,
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    starts = FailingStarts(monkeypatch, times=5)
    outcome = contextlib.nullcontext() if load > 10 else pytest.raises(ServerError)
    with outcome, ray_session._local_ray(tmp_path):
        pass
    assert starts.num_starts == num_starts
    assert capsys.readouterr().out.count("it is started again") == num_starts - 1
