"""The numbers of a sample: memory by kind of process, an engine's load, turns that
ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import cast

import psutil
import pytest
from recorded_run import record_run

from invrl.engines.client.sglang_responses import decode_load
from invrl.errors import ServerError
from invrl.host.processes.resident_memory import resident_memory
from invrl.observe.sinks.sinks import Sink
from invrl.run.processes.background import in_background
from invrl.run.processes.process_samples import (
    engine_samples,
    gateway_sample,
    process_memory,
    sample_memory,
)
from invrl.store.run_store import EndedTurns, RunStore
from invrl.store.timeline_file import EngineSample, Sample
from invrl.train.trainer.train_handle import TrainHandle
from invrl.types.fleet import EngineLoad, FleetSnapshot

PARENT = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); p.wait()"
CHILD = "content = bytearray(60_000_000); print('ready', flush=True); import time; time.sleep(600)"


def test_memory_counts_for_the_nearest_known_ancestor() -> None:
    """Here the parent is an engine, and its child holds the memory."""
    command = [sys.executable, "-c", PARENT.format(child=CHILD)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        try:
            assert parent.stdout.readline() == b"ready\n"
            named = resident_memory(
                {parent.pid: "engine-0"}, own="driver", others="ray"
            )
            unnamed = resident_memory({}, own="driver", others="ray")
        finally:
            for process in psutil.Process(parent.pid).children(recursive=True):
                process.kill()
            parent.kill()
    assert named["engine-0"] > 60_000_000
    assert unnamed["ray"] > 60_000_000
    assert "engine-0" not in unnamed
    assert named["driver"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)


def test_memory_of_an_unknown_process_counts_by_its_name() -> None:
    """The kernel keeps 15 characters of a name."""
    rename = (
        "import ctypes; ctypes.CDLL(None).prctl(15, b'ray::BufferActor', 0, 0, 0); "
    )
    with subprocess.Popen(
        [sys.executable, "-c", rename + CHILD], stdout=subprocess.PIPE
    ) as actor:
        assert actor.stdout is not None
        try:
            assert actor.stdout.readline() == b"ready\n"
            memory = process_memory(None, None)
            by_id = resident_memory(
                {actor.pid: "rank-0"},
                own="driver",
                others="other",
                names={"ray::BufferActor": "buffer"},
            )
        finally:
            actor.kill()
    assert memory["buffer"] > 60_000_000
    assert memory["driver"] > 10_000_000
    assert by_id["rank-0"] > 60_000_000
    assert "buffer" not in by_id


def test_schedulers_of_an_engine_count_together() -> None:
    load = b'{"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5, "later": [1]}'
    other = b'{"num_running_reqs": 1, "num_waiting_reqs": 0, "token_usage": 0.1, "gen_throughput": 7.0}'
    assert decode_load(b'{"loads": [' + load + b"]}") == EngineLoad(
        running=3, waiting=1, kv_use=0.5
    )
    both = decode_load(b'{"loads": [' + load + b"," + other + b"]}")
    assert both.running == 4
    assert both.waiting == 1
    assert both.tokens_per_s == 7.0
    assert both.kv_use == pytest.approx(0.3)


def test_kv_cache_of_an_engine_is_that_of_all_its_schedulers() -> None:
    one = b'{"max_total_num_tokens": 1000, "num_used_tokens": 300}'
    load = decode_load(b'{"loads": [' + one + b"," + one + b"]}")
    assert load.kv_tokens == 2000
    assert load.kv_used == 600
    assert decode_load(b'{"loads": [{}]}').kv_tokens is None


def test_engine_samples_have_the_engines_that_report_their_load() -> None:
    load = EngineLoad(running=3, waiting=1, kv_use=0.5, cache_hit_rate=0.9)
    assert engine_samples(FleetSnapshot(engines={"engine-1": load})) == (
        EngineSample(
            name="engine-1",
            running=3,
            waiting=1,
            kv_use=0.5,
            cache_hit_rate=0.9,
            tokens_per_s=None,
        ),
    )


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{}", b'{"loads": [{"num_running_reqs": "many"}]}', b"\xff"]
)
def test_unreadable_engine_load_is_an_engine_error(answer: bytes) -> None:
    with pytest.raises(ServerError, match="cannot be read"):
        decode_load(answer)


class LocalRank:
    """A trainer of which one rank is the process `pid` of this machine. The first
    question of it fails."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._asked = 0

    def local_pids(self) -> dict[str, int]:
        self._asked += 1
        if self._asked == 1:
            raise OSError("it ends just now")
        return {"rank-0": self._pid}


class SampleList(Sink):
    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def sample(self, sample: Sample) -> None:
        self.samples.append(sample)


async def test_train_only_run_has_memory_samples() -> None:
    kept = SampleList()
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout
        child.stdout.readline()
        trainer = cast(TrainHandle, LocalRank(child.pid))
        async with in_background(sample_memory(trainer, kept, 0.01)):
            async with asyncio.timeout(30):
                while len(kept.samples) < 2:
                    await asyncio.sleep(0.01)
        child.kill()
    for sample in kept.samples:
        assert sample.engines == ()
        assert sample.gateway is None
        assert sample.memory["rank-0"] > 60_000_000
        assert sample.memory["driver"] > 0
    await sample_memory(trainer, kept, 0.0)  # none were asked for


def test_each_turn_counts_in_exactly_one_sample(tmp_path: Path) -> None:
    run = record_run(tmp_path)
    run.add("a", ["first", "second"], 1.0)
    store = RunStore(run.folder.store_path)
    try:
        first = store.ended_turns(0)
        assert len(first.seconds) == 2
        assert first.sequence == store.last_turn()
        turns = [turn for rollout in ("ses-00000",) for turn in store.turns(rollout)]
        assert (
            first.sampled_tokens == sum(len(turn.sampled_ids_T) for turn in turns) > 0
        )
        assert first.prompt_tokens == sum(turn.prompt_tokens for turn in turns)
        none = EndedTurns(
            sequence=first.sequence,
            seconds=(),
            prompt_tokens=0,
            cached_tokens=0,
            sampled_tokens=0,
        )
        assert store.ended_turns(first.sequence) == none
        run.add("b", "third", 1.0)
        assert len(store.ended_turns(first.sequence).seconds) == 1
    finally:
        store.close()


def test_latencies_are_of_finished_turns() -> None:
    seconds = tuple(float(number) for number in range(1, 101))
    ended = EndedTurns(
        sequence=1,
        seconds=seconds,
        prompt_tokens=200,
        cached_tokens=50,
        sampled_tokens=400,
    )
    sample = gateway_sample(ended, 5.0)
    assert sample.requests == 100
    assert sample.latency_p50_s == 51.0
    assert sample.latency_p95_s == 96.0
    assert sample.cache_hit_rate == 0.25
    assert sample.tokens_per_s == 80.0
    nothing = gateway_sample(
        EndedTurns(
            sequence=1, seconds=(), prompt_tokens=0, cached_tokens=0, sampled_tokens=0
        ),
        5.0,
    )
    assert nothing.latency_p50_s is None
    assert nothing.cache_hit_rate is None
