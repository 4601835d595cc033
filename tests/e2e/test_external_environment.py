"""A run that trains through an environment which it did not start, nor knows. The
environment traces its calls, and the run sends its spans to a collector and logs
JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from trace_collector import Collector, running_collector

from e2e.external_environment import SPAN_ID, trace_id
from e2e.runs import DEADLINE_S, flags, invrl, steps_of
from invrl.host.network.ports import free_port
from invrl.store.batch_file import batch_path, load_batch
from invrl.store.run_store import RunStore
from invrl.types.batches import TrainBatch

KEY = "env-of-the-outside-test"
pytestmark = pytest.mark.timeout(DEADLINE_S)


@dataclass(frozen=True, slots=True)
class Outside:
    """The run, once it and the stranger have ended."""

    folder: Path
    printed: str
    """By the run."""
    port: int
    """Of the gateway."""
    log: list[dict]
    """What the stranger wrote."""
    collector: Collector

    def batch(self, step: int) -> TrainBatch:
        return load_batch(batch_path(self.folder / "rollout_data", step))


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    folder = tmp_path_factory.mktemp("outside")
    port = free_port()
    log = folder / "outside.jsonl"
    place = [f"http://127.0.0.1:{port}", KEY, str(log)]
    command = [
        sys.executable,
        str(Path(__file__).parent / "external_environment.py"),
        *place,
    ]
    with pytest.MonkeyPatch.context() as environment, running_collector() as collector:
        environment.setenv("INVRL_ENV_KEY", KEY)
        stranger = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": ""})
        try:
            more = [
                "--external-environments",
                "--no-rollout-function-path",  # the environment is the agent: no function of ours runs
                "--gateway.port",
                str(port),
                "--num-steps",
                "2",
                "--save-rollout-data",
            ]
            more += [
                "--rollout-batch-size",
                "2",
                "--n-samples-per-prompt",
                "2",
                "--session.lease-timeout-s",
                "10",
            ]
            more += [
                "--log.otel-endpoint",
                collector.url,
                "--log.format",
                "json",
                "--log.level",
                "debug",
            ]
            printed = invrl(folder, "train", *flags(folder, "run"), *more)
            assert stranger.wait(60) == 0, (
                "it was told that the run has ended, and met no closed connection"
            )
        finally:
            stranger.kill()
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        yield Outside(folder / "run", printed, port, lines, collector)


def test_outside_environment_leases_tasks_and_trains_the_model(
    outside: Outside, tmp_path: Path
) -> None:
    assert f":{outside.port}/tasks/lease" in outside.printed
    finished = {one["session_id"]: one for one in outside.log if "session_id" in one}
    steps = steps_of(outside.folder)
    assert len(steps) == 2
    assert steps[-1]["rollout/trained_fraction"] == 1.0
    for step in (1, 2):
        batch = outside.batch(step)
        for sample in batch.samples:
            assert sample.reward == finished[sample.rollout_id]["reward"]
        assert len({sample.rollout_id for sample in batch.samples}) == 4
        assert len(batch.samples) == 8, "a row for the session and one for its child"
        with_turn = [
            a
            for s, a in zip(batch.samples, batch.advantages, strict=True)
            if len(s.turn_ids) == 2
        ]
        assert any(len(np.unique(row_T[row_T != 0])) == 2 for row_T in with_turn), (
            "a turn's own reward"
        )
    let_go = next(one["let_go"]["group_id"] for one in outside.log if "let_go" in one)
    assert {
        one["attempt"] for one in finished.values() if one["group_id"] == let_go
    } == {1}
    # checks that every rollout ended once
    invrl(tmp_path, "ledger", str(outside.folder))


@pytest.mark.parametrize("step", [1, 2])
def test_trace_of_a_token_goes_from_the_agents_call_to_the_first_weights_trained_on_it(
    outside: Outside, step: int
) -> None:
    """The last token of a conversation, through the real router and the real engine."""
    sample = next(
        sample for sample in outside.batch(step).samples if len(sample.turn_ids) == 2
    )
    token = int(np.flatnonzero(sample.loss_mask_T)[-1])
    [turn_id] = [
        turn_id
        for turn_id, (start, end) in zip(
            sample.turn_ids, sample.turn_spans, strict=True
        )
        if start <= token < end
    ]
    with contextlib.closing(RunStore(outside.folder / "run.sqlite")) as store:
        place = store.turn_traces([turn_id])[turn_id]
    assert place.trace_id == trace_id(sample.rollout_id, num_messages=3)

    of_trace = [
        span
        for span in outside.collector.spans
        if span.trace_id.hex() == place.trace_id
    ]
    from_engine = [
        span
        for span in outside.collector.spans_of("sglang")
        if span.trace_id.hex() == place.trace_id
    ]
    chain = {span.name: span for span in of_trace if span not in from_engine}
    ids = {name: span.span_id.hex() for name, span in chain.items()}
    assert {name: span.parent_span_id.hex() for name, span in chain.items()} == {
        "agent_call": SPAN_ID,
        "turn": ids["agent_call"],
        "generate": ids["turn"],
        "commit": ids["turn"],
        "batch": ids["turn"],
        "train_step": ids["batch"],
        "weight_version": ids["train_step"],
    }
    attributes = {item.key: item.value for item in chain["weight_version"].attributes}
    assert attributes["invrl.turn"].string_value == turn_id
    assert attributes["invrl.weight_version"].int_value == step

    [request] = [span for span in from_engine if f" Req {turn_id[:8]}" in span.name]
    assert request.parent_span_id.hex() == ids["generate"], (
        "the router passed the gateway's span on"
    )
    assert {"tokenize", "prefill_waiting", "prefill_forward", "decode_forward"} <= {
        span.name for span in from_engine
    }
    known = {span.span_id for span in of_trace}
    assert all(span.parent_span_id in known for span in from_engine)
    generate, slack_ns = chain["generate"], 0.1e9  # two clocks
    assert generate.start_time_unix_nano - slack_ns < request.start_time_unix_nano
    assert request.end_time_unix_nano < generate.end_time_unix_nano + slack_ns
    assert request.end_time_unix_nano > request.start_time_unix_nano


def test_engine_sends_only_spans_below_those_of_the_gateway(outside: Outside) -> None:
    """No span of a health check or a canary; no prompt, no reply and no key."""
    traces = {span.trace_id for span in outside.collector.spans_of("invrl-gateway")}
    assert {span.trace_id for span in outside.collector.spans_of("sglang")} <= traces
    sent = b"".join(outside.collector.bodies)
    assert b"a child" not in sent, "what the stranger says to the model"
    assert not [key for key in keys_of(outside) if key.encode() in sent]


def test_each_step_of_the_driver_is_a_trace_of_its_phases(outside: Outside) -> None:
    spans = outside.collector.spans_of("invrl-driver")
    roots = [span for span in spans if span.name == "step"]
    assert len(roots) >= 2
    phases = {span.name for span in spans if span.parent_span_id == roots[-1].span_id}
    assert {"rollout", "assemble", "train", "sync", "checkpoint"} <= phases


def test_every_json_log_line_names_its_process_and_run(
    outside: Outside,
) -> None:
    """Of a file that Ray has named, the first lines say it too."""
    logs = outside.folder / "logs"
    seen = set()
    for path in [
        logs / "driver.log",
        logs / "gateway.log",
        *logs.glob("ray/*/worker-*"),
    ]:
        text = path.read_text().splitlines()
        marks = [line for line in text if line.startswith(":process:")]
        objects = [json.loads(line) for line in text if not line.startswith(":")]
        assert {line["run"] for line in objects} <= {"run"}
        processes = {line["process"] for line in objects}
        if path.parent != logs:
            [process] = [
                mark.removeprefix(":process:").removesuffix(" of run run")
                for mark in marks
            ]
            assert processes <= {process}
            processes.add(process)
        seen |= processes
    assert seen >= {"gateway", "buffer", "trainer-rank-0"}
    assert all(re.fullmatch(r"[a-z]+(-[a-z0-9]+)*", process) for process in seen)


def test_no_key_is_in_any_log(outside: Outside) -> None:
    keys = keys_of(outside)
    for path in (outside.folder / "logs").rglob("*"):
        if path.is_file():
            log = path.read_bytes()
            assert not [key for key in keys if key.encode() in log], path


def keys_of(outside: Outside) -> set[str]:
    """The environment's, the router's, and those of eight sessions."""
    private = (outside.folder / "private").rglob("*")
    text = " ".join(path.read_text() for path in private if path.is_file())
    keys = {KEY, *(one["key"] for one in outside.log if "key" in one)}
    keys |= set(re.findall(r'"\w*key\w*": ?"([^"]{16,})"', text))
    assert len(keys) >= 10
    return keys
