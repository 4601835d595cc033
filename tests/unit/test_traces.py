"""One trace from an agent's call to the weight version that was trained on it, at a
collector on this machine. The engine is a fake."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import uvicorn
from fakes import FakeEngine, random_reply
from loop_parts import save_nothing, sync_at_once
from trace_collector import Collector, running_collector

from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.errors import ConfigError
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.server.http.http_protocol import LimitedHttpProtocol
from invrl.gateway.server.routes.app import make_app
from invrl.gateway.server.settings import GatewaySettings
from invrl.host.output.traces import (
    SpanPlace,
    Traces,
    child_span,
    current_traceparent,
    traces_endpoint,
)
from invrl.interfaces import StepResult
from invrl.observe.sinks.phase_traces import PhaseTraces
from invrl.observe.sinks.sinks import Sink
from invrl.observe.sinks.trace_checks import check_traces
from invrl.run.loop.loop import Learner, Parts, run_loop
from invrl.run.loop.step_traces import StepTraces
from invrl.run.settings.config import Source, resolve
from invrl.store.run_store import RunStore
from invrl.store.run_store_writer import RunStoreWriter
from invrl.store.timeline_file import Span as PhaseSpan
from invrl.types.batches import TakenBatch, TrainBatch, TrainSample
from invrl.types.file_entry import FileEntries
from invrl.types.groups import DroppedGroup
from invrl.types.leases import GroupLease
from invrl.types.metrics import Max, Metric
from invrl.types.rollouts import Outcome
from invrl.types.turns import Turn
from invrl.types.weights import WeightVersion

ENV_KEY = "env-0123456789abcdef"
PROMPT = "What is 12*13, by the way?"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running_collector() as server:
        yield server


@dataclass
class Running:
    """A gateway on a fake engine, with one session."""

    engine: FakeEngine
    store_path: Path
    url: str
    key: str
    session_id: str
    http: httpx.AsyncClient

    async def call(self, headers: Mapping[str, str], *, stream: bool = False) -> Turn:
        """One call of the agent. Returns the newest turn."""
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": PROMPT}],
            "stream": stream,
        }
        headers = {"authorization": f"Bearer {self.key}", **headers}
        answer = await self.http.post(
            f"{self.url}/v1/chat/completions", json=body, headers=headers
        )
        assert answer.status_code == 200, answer.text
        with contextlib.closing(RunStore(self.store_path)) as store:
            return store.turns(self.session_id)[-1]

    def place(self, turn: Turn) -> SpanPlace | None:
        with contextlib.closing(RunStore(self.store_path)) as store:
            return store.turn_traces([turn.id, "another"]).get(turn.id)


@contextlib.asynccontextmanager
async def gateway(
    folder: Path, model: Path, traces: Traces | None
) -> AsyncIterator[Running]:
    async with (
        FakeEngine(random_reply()) as engine,
        httpx.AsyncClient(timeout=120) as http,
    ):
        listener = socket.create_server(("127.0.0.1", 0))
        settings = GatewaySettings.model_validate(
            {
                "port": listener.getsockname()[1],
                "router_url": engine.url,
                "env_key": ENV_KEY,
                "model_path": str(model),
                "model_name": "tiny",
                "store_path": str(folder / "run.sqlite"),
                "max_new_tokens": 16,
                "context_length": 1024,
                "vocab_size": 512,
            }
        )
        store = RunStoreWriter(Path(settings.store_path))
        client = SglangClient(
            engine.url, limits=EngineLimits(vocab_size=512, context_length=1024)
        )
        app = make_app(
            settings,
            sampler=client,
            renderer=load_renderer(str(model), 512),
            store=store,
            traces=traces,
            on_shutdown=client.close,
        )
        config = uvicorn.Config(
            app,
            log_level="warning",
            http=LimitedHttpProtocol,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(60):
                while not server.started:
                    await asyncio.sleep(0.01)
            terms = {
                "task_id": "t",
                "group_id": "g",
                "members": [{"index": 0, "attempt": 0}],
            }
            opened = await http.post(
                f"{settings.url}/sessions",
                json=terms,
                headers={"authorization": f"Bearer {ENV_KEY}"},
            )
            [session] = opened.json()["sessions"]
            path = Path(settings.store_path)
            yield Running(
                engine, path, settings.url, session["key"], session["id"], http
            )
        finally:
            server.should_exit = True
            await serving
            store.close()


class OneBatch:
    """A buffer that hands out batches without groups."""

    async def lease(self) -> GroupLease | None:
        return None

    async def record(self, outcome: Outcome) -> None: ...

    async def unwanted(self) -> Sequence[DroppedGroup]:
        return ()

    async def take(self) -> TakenBatch:
        return TakenBatch(batch_id=7, version=WeightVersion(0), groups=())

    async def trained(self, batch_id: int) -> None: ...

    async def snapshot(self, trained: WeightVersion) -> bytes:
        return b""

    async def advance(self, version: WeightVersion) -> None: ...

    async def metrics(self) -> Mapping[str, Metric]:
        return {}


class OneStep:
    """A trainer that takes its time."""

    async def train(self, batch: TrainBatch) -> StepResult:
        await asyncio.sleep(0.02)
        return StepResult(
            optimizer_steps=1,
            nonfinite_steps=0,
            metrics={"skipped_steps": Max(0)},
            seconds={},
        )

    async def save_checkpoint(self, path: str) -> FileEntries:
        return {}

    async def load_checkpoint(self, path: str) -> None: ...

    async def export_hugging_face(self, path: str) -> FileEntries:
        return {}


def row_of(turn: Turn) -> TrainSample:
    """The row of training data that is made of one turn."""
    context = len(turn.context_ids_T)
    tokens_T = np.concatenate([turn.context_ids_T, turn.sampled_ids_T])
    sampled_T = np.arange(len(tokens_T)) >= context
    return TrainSample(
        tokens_T=tokens_T,
        loss_mask_T=sampled_T,
        rollout_logprobs_T=np.where(sampled_T, -1.0, 0.0).astype(np.float32),
        versions_T=np.where(sampled_T, 0, -1).astype(np.int32),
        reward=1.0,
        temperature=1.0,
        group_id="g",
        rollout_id=turn.session_id,
        attempt=0,
        turn_ids=(turn.id,),
        turn_spans=((context, len(tokens_T)),),
    )


async def train_on(turn: Turn, trace: StepTraces) -> None:
    """One step of the loop, on a batch that has this turn and one without a trace."""
    rows = (row_of(turn), row_of(turn))
    batch = TrainBatch(
        batch_id=7,
        version=WeightVersion(0),
        samples=rows,
        advantages=tuple(np.zeros(len(row.tokens_T), np.float32) for row in rows),
    )

    parts = Parts(
        buffer=OneBatch(),
        assemble=lambda step, taken: batch,
        observer=Sink(),
        learner=Learner(trainer=OneStep(), sync=sync_at_once, save=save_nothing),
        trace=trace.add,
    )
    assert await run_loop(parts, done=0, num_steps=1) == 1


def open_at(collector: Collector, service: str) -> Traces:
    return Traces(traces_endpoint(collector.url), service=service, run="r")


@pytest.mark.parametrize("stream", [False, True])
async def test_trace_of_a_turn_goes_from_the_agents_call_to_the_first_weights_trained_on_it(
    tmp_path: Path, model: Path, collector: Collector, stream: bool
) -> None:
    in_gateway = open_at(collector, "invrl-gateway")
    async with gateway(tmp_path, model, in_gateway) as running:
        turn = await running.call({"traceparent": TRACEPARENT}, stream=stream)
        place = running.place(turn)
    in_driver = open_at(collector, "invrl-driver")
    await train_on(turn, StepTraces(in_driver, running.store_path))
    in_gateway.close()
    in_driver.close()

    chain = collector.chain(TRACE_ID)
    parents = {name: span.parent_span_id.hex() for name, span in chain.items()}
    ids = {name: span.span_id.hex() for name, span in chain.items()}
    assert parents == {
        "agent_call": PARENT_ID,
        "turn": ids["agent_call"],
        "generate": ids["turn"],
        "commit": ids["turn"],
        "batch": ids["turn"],
        "train_step": ids["batch"],
        "weight_version": ids["train_step"],
    }
    assert place == SpanPlace(TRACE_ID, ids["turn"])
    assert running.engine.traceparents == [f"00-{TRACE_ID}-{ids['generate']}-01"]
    order = [
        "agent_call",
        "turn",
        "generate",
        "commit",
        "batch",
        "train_step",
        "weight_version",
    ]
    starts = [chain[name].start_time_unix_nano for name in order]
    assert starts == sorted(starts)
    assert all(
        span.end_time_unix_nano >= span.start_time_unix_nano for span in chain.values()
    )
    assert (
        chain["train_step"].end_time_unix_nano
        - chain["train_step"].start_time_unix_nano
        > 15e6
    )
    values = {
        name: {
            item.key: item.value.string_value or item.value.int_value
            for item in span.attributes
        }
        for name, span in chain.items()
    }
    assert (
        values["turn"]["invrl.turn"]
        == values["weight_version"]["invrl.turn"]
        == turn.id
    )
    assert values["agent_call"]["invrl.session"] == running.session_id
    assert values["weight_version"]["invrl.weight_version"] == 1
    assert values["batch"]["invrl.batch"] == 7
    assert values["commit"]["invrl.sampled_tokens"] == len(turn.sampled_ids_T)
    sent = b"".join(collector.bodies)
    for secret in (running.key, ENV_KEY, PROMPT, PROMPT[:12]):
        assert secret.encode() not in sent


@pytest.mark.parametrize(
    "header",
    ["", "00-xyz", f"00-{'0' * 32}-{PARENT_ID}-01", f"ff-{TRACE_ID}-{PARENT_ID}-01"],
)
async def test_without_a_proper_traceparent_a_trace_begins_at_the_gateway(
    tmp_path: Path, model: Path, collector: Collector, header: str
) -> None:
    traces = open_at(collector, "invrl-gateway")
    async with gateway(tmp_path, model, traces) as running:
        turn = await running.call({"traceparent": header} if header else {})
        place = running.place(turn)
    traces.close()
    assert place is not None
    assert place.trace_id != TRACE_ID
    chain = collector.chain(place.trace_id)
    assert set(chain) == {"agent_call", "turn", "generate", "commit"}
    assert chain["agent_call"].parent_span_id == b""


async def test_trace_not_sampled_by_the_agent_is_forwarded_and_not_exported(
    tmp_path: Path, model: Path, collector: Collector
) -> None:
    traces = open_at(collector, "invrl-gateway")
    async with gateway(tmp_path, model, traces) as running:
        turn = await running.call({"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"})
        place = running.place(turn)
    traces.close()
    assert place is None
    [passed] = running.engine.traceparents
    assert passed.startswith(f"00-{TRACE_ID}-")
    assert passed.endswith("-00")
    assert collector.spans == []


async def test_no_trace_is_recorded_or_forwarded_if_tracing_is_off(
    tmp_path: Path, model: Path
) -> None:
    async with gateway(tmp_path, model, None) as running:
        turn = await running.call({"traceparent": TRACEPARENT})
        assert running.place(turn) is None
    assert running.engine.traceparents == [""]


@pytest.mark.parametrize("silent", [False, True], ids=["refuses", "never answers"])
def test_dead_collector_does_not_hold_up_requests(silent: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # never accepts
        port = listener.getsockname()[1]
        if not silent:
            listener.close()
        traces = Traces(
            f"http://127.0.0.1:{port}/v1/traces", service="invrl-driver", run="r"
        )
        began = time.monotonic()
        parent = SpanPlace(TRACE_ID, PARENT_ID)
        for _ in range(40_000):  # more than the queue holds
            traces.past_span("batch", parent, start=1.0, end=2.0, attributes={})
        # one wait for an answer would take 5 s for each 512
        assert time.monotonic() - began < 60
        began = time.monotonic()
        traces.close(deadline_s=1.0)
        assert time.monotonic() - began < 5


async def test_a_store_that_cannot_be_read_does_not_end_the_run(
    tmp_path: Path, model: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway(tmp_path, model, None) as running:
        turn = await running.call({})
    traces = open_at(collector, "invrl-driver")
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(b"no database" * 100)
    await train_on(turn, StepTraces(traces, damaged))
    traces.close()
    assert "the traces of step 1 are not complete" in caplog.text


def test_a_drivers_step_is_a_trace_with_a_span_for_each_phase(
    collector: Collector,
) -> None:
    sink = PhaseTraces(open_at(collector, "invrl-driver"))
    sink.step(0, {})  # no phase: no trace
    for name, step, start, end in [
        ("train", 1, 10.0, 11.0),
        ("evaluating", 1, 11.5, 12.0),
    ]:
        sink.span(PhaseSpan(lane="trainer", name=name, step=step, start=start, end=end))
    sink.step(1, {"train/loss": 1.0})
    sink.span(PhaseSpan(lane="trainer", name="train", step=2, start=12.0, end=13.0))
    sink.close()  # within step 2

    first, second = sorted(
        {span.trace_id.hex() for span in collector.spans}, key=first_start(collector)
    )
    chain = collector.chain(first)
    assert set(chain) == {"step", "train", "evaluating"}
    root = chain.pop("step")
    assert root.parent_span_id == b""
    assert {span.parent_span_id for span in chain.values()} == {root.span_id}
    assert root.start_time_unix_nano == 10e9
    assert root.end_time_unix_nano == 12e9
    assert [(item.key, item.value.int_value) for item in root.attributes] == [
        ("invrl.step", 1)
    ]
    assert set(collector.chain(second)) == {"step", "train"}


def test_evaluation_that_ends_during_a_later_step_has_a_trace_alone(
    collector: Collector,
) -> None:
    sink = PhaseTraces(open_at(collector, "invrl-driver"))
    for name, step in [("train", 2), ("evaluating", 1), ("sync", 2)]:
        if name == "sync":
            sink.step(1, {"eval/greedy/accuracy": 0.5})
        sink.span(
            PhaseSpan(lane="trainer", name=name, step=step, start=1.0 + step, end=4.0)
        )
    sink.step(2, {"train/loss": 1.0})
    sink.close()
    traces = {span.trace_id.hex() for span in collector.spans}
    evaluation, step = sorted(traces, key=first_start(collector))
    assert set(collector.chain(evaluation)) == {"step", "evaluating"}
    assert set(collector.chain(step)) == {"step", "train", "sync"}


def first_start(collector: Collector) -> Callable[[str], int]:
    def start(trace_id: str) -> int:
        return min(
            s.start_time_unix_nano
            for s in collector.spans
            if s.trace_id.hex() == trace_id
        )

    return start


def test_exception_is_recorded_only_by_its_type(collector: Collector) -> None:
    traces = open_at(collector, "invrl-gateway")
    with (
        pytest.raises(ValueError, match="secret"),
        traces.call("agent_call", TRACEPARENT, {}),
        child_span("turn"),
    ):
        raise ValueError(f"a secret: {PROMPT}")
    assert current_traceparent() == ""
    traces.close()
    assert len(collector.spans) == 2
    assert PROMPT.encode() not in b"".join(collector.bodies)
    assert b"ValueError" in b"".join(collector.bodies)


def test_trace_endpoint_comes_from_the_settings_or_the_standard_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        "OTEL_SDK_DISABLED",
    ):
        monkeypatch.delenv(name, raising=False)
    assert traces_endpoint("") == ""
    assert traces_endpoint("http://a:4318/") == "http://a:4318/v1/traces"
    assert traces_endpoint("http://a:4318/v1/traces") == "http://a:4318/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://b:4318")
    assert traces_endpoint("") == "http://b:4318/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://c:4318/spans")
    assert traces_endpoint("") == "http://c:4318/spans"
    assert traces_endpoint("http://a:4318") == "http://a:4318/v1/traces"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert traces_endpoint("http://a:4318") == ""


@pytest.mark.parametrize(
    ("tables", "field", "says"),
    [
        (
            {"log": {"otel_endpoint": "127.0.0.1:4318"}},
            "log.otel_endpoint",
            "http://127.0.0.1:4318",
        ),
        (
            {"log": {"otel_endpoint": "http://me:secret@host"}},
            "log.otel_endpoint",
            "OTEL_EXPORTER_OTLP_HEADERS",
        ),
        (
            {"log": {"otel_endpoint": "http://h:1"}, "router": {"enable_trace": True}},
            "router.enable_trace",
            "leave it out",
        ),
    ],
)
def test_unusable_trace_settings_are_refused_before_the_start(
    tables: dict, field: str, says: str
) -> None:
    model = {"model": {"model_path": "m"}}
    with pytest.raises(ConfigError) as refused:
        check_traces(resolve(Source(name="test", tables={**model, **tables})))
    assert field in str(refused.value)
    assert says in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("variables", "field", "says"),
    [
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL = 'grpc'",
            "http/protobuf",
        ),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
            "TRACES_PROTOCOL = 'http/json'",
            "4318",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "h:4318"},
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "http://127.0.0.1:4318",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "me:secret@h"},
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "HEADERS",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:secret@h"},
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "HEADERS",
        ),
    ],
)
def test_unusable_trace_variables_are_refused_before_the_start(
    variables: dict[str, str], field: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve(Source(name="test", tables={"model": {"model_path": "m"}}))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://h:4318")
    check_traces(config)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    check_traces(config)  # the protocol of traces comes first
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refused:
        check_traces(config)
    assert field in str(refused.value)
    assert says in str(refused.value)
    assert "secret" not in str(refused.value)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    check_traces(config)


def test_missing_trace_sdk_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = partial(resolve, Source(name="m", tables={"model": {"model_path": "m"}}))
    monkeypatch.setattr("invrl.observe.sinks.trace_checks.lacks_sdk", lambda: True)
    check_traces(config())
    with pytest.raises(ConfigError, match=r"invrl\[otel\]"):
        check_traces(
            config(Source(name="t", tables={"log": {"otel_endpoint": "http://h:1"}}))
        )
