"""The metrics of a run from its start to its end: where they are, and that they end no
run."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from invrl.buffer.groups.event_counts import BufferCounts
from invrl.engines.fleet.fleet_state import FleetState
from invrl.errors import DeadlineError, ServerError
from invrl.observe.sinks.sinks import JsonlSink
from invrl.run.processes import served_metrics
from invrl.run.processes.served_metrics import ServedMetrics
from invrl.run.settings.config import Config, resolve
from invrl.run.settings.run_config import MetricsConfig
from invrl.store.run_folder import RunFolder


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        return probe.getsockname()[1]


def settings(port: int) -> Config:
    config = resolve()
    run = config.run.model_copy(update={"metrics": MetricsConfig(port=port or None)})
    return config.model_copy(update={"run": run})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(path=tmp_path)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def metrics(folder: RunFolder, port: int) -> Iterator[ServedMetrics]:
    with closing(ServedMetrics(settings(port), folder, "train", num_steps=7)) as served:
        yield served


def scrape(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
        return answer.read().decode()


def test_no_metrics_are_served_without_a_port(folder: RunFolder) -> None:
    with closing(ServedMetrics(settings(0), folder, "train")) as served:
        assert served.sinks() == []
        assert served.message == ""


def test_metrics_are_served_from_the_start_until_closed(
    metrics: ServedMetrics, port: int, folder: RunFolder
) -> None:
    assert metrics.message == f"metrics: http://127.0.0.1:{port}/metrics"
    text = scrape(port)
    assert "invrl_steps_wanted 7.0\n" in text
    assert f'run="{folder.path.name}"' in text
    assert 'invrl_source_up{source="disk"} 1.0\n' in text
    [sink] = metrics.sinks()
    sink.step(1, {"train/loss": 0.5})
    assert "invrl_loss 0.5\n" in scrape(port)
    metrics.close()
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_metrics_of_the_next_incarnation_continue_from_metrics_jsonl(
    folder: RunFolder, port: int
) -> None:
    sink = JsonlSink(folder.metrics_path)
    sink.step(3, {"train/loss": 0.25, "train/tokens": 10.0})
    sink.close()
    with folder.metrics_path.open("a") as file:
        file.write('{"step": 4, "train/lo')  # the driver was killed as it wrote
    with closing(ServedMetrics(settings(port), folder, "train")):
        text = scrape(port)
    assert "invrl_step 3.0\n" in text
    assert "invrl_loss 0.25\n" in text
    assert "invrl_trained_tokens_total" not in text


def test_taken_metrics_port_does_not_end_the_run(folder: RunFolder) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with closing(ServedMetrics(settings(port), folder, "train")) as served:
            assert served.message.startswith(
                f"warning: metrics are not served at 127.0.0.1:{port}: "
            )
            assert served.sinks() == []
            with served.of_serving(cast("Any", None)):
                pass


def test_router_and_engine_metrics_are_served_while_they_run(
    metrics: ServedMetrics, port: int
) -> None:
    gone = free_port()
    state = FleetState(
        alive={"engine-0": f"http://127.0.0.1:{gone}"},
        lost=("engine-1",),
        restarts={},
        router_metrics={"router": f"http://127.0.0.1:{gone}/metrics"},
    )
    child = subprocess.Popen(["sleep", "60"])
    gateway = SimpleNamespace(url=f"http://127.0.0.1:{gone}", process=child)
    fleet = SimpleNamespace(
        state=lambda: state, routers={"router": SimpleNamespace(pid=-1)}, engines={}
    )
    serving = SimpleNamespace(gateway=gateway, env_key="k", fleet=fleet)
    with metrics.of_serving(cast("Any", serving)):
        text = scrape(port)
        child.kill()
        child.wait()
        assert 'invrl_process_resident_bytes{process="driver"}' in text
        assert 'invrl_process_resident_bytes{process="gateway"}' in text
        assert 'invrl_engines{state="lost"} 1.0\n' in text
        assert 'invrl_source_up{source="gateway"} 0.0\n' in text
        for name in ("router", "engine-0"):
            with pytest.raises(urllib.error.HTTPError, match="502"):
                scrape(port, f"/metrics/{name}")
    assert "invrl_engines{" not in scrape(port)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scrape(port, "/metrics/engine-0")


class Buffer:
    """Answers what it was given, in this order."""

    def __init__(self, answers: list[BufferCounts | Exception]) -> None:
        self.answers = answers

    async def counts(self) -> BufferCounts:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_busy_buffer_is_polled_again_and_a_dead_buffer_is_not(
    metrics: ServedMetrics, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_metrics, "_BUFFER_INTERVAL_S", 0.0)
    counts = BufferCounts(states={"rollouts_trained": 5}, failed={}, dropped={})
    asked_twice = asyncio.Event()

    class Watched(Buffer):
        async def counts(self) -> BufferCounts:
            if not self.answers:
                asked_twice.set()
                await asyncio.sleep(60)
            return await super().counts()

    buffer = Watched([DeadlineError("the buffer", 1.0), counts])
    watching = asyncio.create_task(metrics.watch_buffer(buffer, resumed=False))
    await asyncio.wait_for(asked_twice.wait(), 10)
    text = await asyncio.to_thread(scrape, port)
    assert 'invrl_rollouts_ended_total{end="trained"} 5.0\n' in text
    assert 'invrl_rollouts_failed_total{reason="timeout"} 0.0\n' in text
    watching.cancel()
    dead = Buffer([ServerError("the buffer has died")])
    await asyncio.wait_for(metrics.watch_buffer(dead, resumed=False), 10)
    assert 'source="buffer"' not in await asyncio.to_thread(scrape, port)
