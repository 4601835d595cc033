"""What `python -m benchmarks.weights` makes of the times of tokens and updates, and
what it measures with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from fakes import FakeEngine, random_reply
from tiny_model import make_tiny_model

from benchmarks.ratios import Entry, Part, exceeded, rises
from benchmarks.weight_updates import measurement as weights
from benchmarks.weight_updates.changing_weights import (
    ChangingWeights,
    empty_tensors,
    one_billion_config,
    random_tensors,
    read_model_config,
)
from benchmarks.weight_updates.loader_program import (
    engine_shapes,
    make_application,
    make_module,
)
from benchmarks.weight_updates.streams import Streams
from benchmarks.weight_updates.token_times import (
    Window,
    decode_step,
    longest_gap,
    longest_silence,
)
from benchmarks.weight_updates.weight_settings import WeightBenchSettings
from benchmarks.weight_updates.weight_updates import (
    TimedUpdate,
    UpdatedEngine,
    measure_idle,
    measure_in_flight,
    part_in_flight,
    summarize,
)
from benchmarks.weights import benchmark_weights
from invrl.cli.main import run_with_exit_code
from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.engines.client.weight_receiver import ArenaReceiver
from invrl.engines.inside_sglang.engine_routes import PAUSE_PATH
from invrl.errors import ServerError
from invrl.interfaces import WeightLayout
from invrl.weights.config import ArenaWeights
from invrl.weights.loader.parameter_places import plan
from invrl.weights.tensors.tensor_spec import make_spec


def window(start: float, end: float) -> Window:
    return Window(start=start, end=end)


FIRST = [0.0, 1.0, 2.0, 7.0, 8.0]
SECOND = [0.5, 1.5, 4.0, 9.0]


@pytest.mark.parametrize(
    ("span", "gap", "silence"),
    [
        ((2.5, 3.0), 5.0, 2.0),
        ((4.5, 5.0), 5.0, 3.0),
        ((1.2, 1.8), 2.5, 0.5),
        ((9.0, 99.0), 0.0, 0.0),
    ],
    ids=["early", "late", "before", "after_the_last_token"],
)
def test_gap_is_measured_per_stream_and_silence_over_all_streams(
    span: tuple[float, float], gap: float, silence: float
) -> None:
    assert longest_gap([FIRST, SECOND], window(*span)) == gap
    assert longest_silence([FIRST, SECOND], window(*span)) == silence


def test_decode_step_is_measured_outside_of_updates() -> None:
    assert decode_step([FIRST, SECOND], [window(0.0, 2.0), window(7.0, 8.0)]) == 1.0
    assert decode_step([FIRST, SECOND], [window(1.5, 9.0)]) == 3.75  # 5, 1, 2.5 and 5
    with pytest.raises(ValueError, match="no median"):
        decode_step([FIRST], [window(2.5, 6.5)])


def timed_update(
    start: float, end: float, *, ready_s: float = 0.3, **phases: float
) -> TimedUpdate:
    """It was resumed 0.05 s before its end."""
    return TimedUpdate(
        window=window(start, end),
        resumed_at=end - 0.05,
        ready_s=ready_s,
        copy_s=0.1,
        phases=phases,
    )


def ended_streams(*times: list[float], failures: tuple[str, ...] = ()) -> Streams:
    client = SglangClient(
        "http://127.0.0.1:1", limits=EngineLimits(vocab_size=512, context_length=64)
    )
    streams = Streams(client, number=len(times), max_new_tokens=8, deadline_s=1.0)
    streams.times = list(times)
    streams.failures = list(failures)
    return streams


def test_pause_is_the_gap_minus_the_decode_step_as_a_multiple_of_a_copy() -> None:
    """Gaps of 0.5, 0.7 and 0.8 s, a decode step of 0.1 s, copies of 0.1 s. In the
    second update a token comes after the engine was resumed and before the canary ends:
    a longer gap follows the one of the load."""
    tokens = [0.0, 0.1, 0.6, 0.7, 1.26, 1.96, 2.06, 2.16, 2.96]
    updates = [
        timed_update(0.2, 0.5),
        timed_update(0.8, 1.3),
        timed_update(2.2, 2.9),
    ]
    quiet = [
        window(0.0, 0.1),
        window(0.6, 0.7),
        window(1.96, 2.16),
    ]
    part = part_in_flight(updates, ended_streams(tokens), quiet, number=8, unequal=0)
    assert part.failure == ""
    assert part.ratios == pytest.approx(
        {
            "gap_8_in_place": 6.0,
            "load_gap_8_in_place": 4.6,
            "failed_requests_8": 0,
            "unequal_tensors_8": 0,
        }
    )
    details = part.details["in_flight_8"]
    assert details["gap_s"] == pytest.approx({"median": 0.7, "longest": 0.8})
    assert details["load_gap_s"] == pytest.approx({"median": 0.56, "longest": 0.8})


def test_failed_requests_or_wrong_tensors_fail_the_bench() -> None:
    streams = ended_streams(
        [0.0, 0.1, 0.2, 0.9], failures=("connection reset", "aborted")
    )
    part = part_in_flight(
        [timed_update(0.3, 0.8)], streams, [window(0.0, 0.3)], number=8, unequal=3
    )
    assert part.ratios["failed_requests_8"] == 2
    assert part.ratios["unequal_tensors_8"] == 3
    assert "2 requests failed, the first with: connection reset" in part.failure
    assert "3 tensors" in part.failure


def test_bench_phases_are_medians() -> None:
    updates = [
        timed_update(0, 1, load=seconds, ready_s=10 * seconds)
        for seconds in (0.3, 0.1, 0.2)
    ]
    summary = summarize(updates)
    assert summary["phases"] == {"load": 0.2}
    assert summary["ready_s"] == 2.0
    assert summary["updates"] == 3


def entry(**ratios: float) -> Entry:
    return Entry(
        date="2026-11-23", commit="abc", machine="laptop", model="m", ratios=ratios
    )


def test_costs_that_rise_by_more_than_a_quarter_are_flagged() -> None:
    history = [
        entry(idle=4.0, failed=0.0),
        entry(idle=5.0, failed=0.0),
        entry(idle=90.0, failed=0.0),
    ]
    assert rises(entry(idle=6.25, failed=0.0), history) == []
    failed, idle = rises(entry(failed=1.0, idle=6.3), history)
    assert str(idle) == "idle rose to 6.300: +26% from 5.000 in 3 runs"
    assert str(failed) == "failed rose to 1.000: from 0.000 in 3 runs"
    assert exceeded(
        {"idle": 3.1, "failed": 0.0, "other": 9.0}, {"idle": 3.0, "failed": 0.0}
    ) == ["idle"]


async def test_bench_weights_differ_from_those_of_the_two_previous_versions() -> None:
    """Else a slot of the arena that was not written could hold the right bytes by
    chance."""
    tensors = {"weight": torch.linspace(0.5, 1.0, 257).bfloat16()}
    sender = ChangingWeights(tensors)
    versions: list[torch.Tensor] = []
    for _ in range(9):
        versions.append(tensors["weight"].clone())
        await sender.change()
        for before in versions[-2:]:
            assert bool((tensors["weight"] != before).all())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_loader_has_the_parameters_of_an_engine(
    family: str, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", family=family)  # type: ignore[arg-type]
    empty = empty_tensors(read_model_config(model), torch.float32)
    layout = tuple(make_spec(name, tensor) for name, tensor in empty.items())
    module = make_module(engine_shapes(layout), torch.float32)
    parameters = dict(module.named_parameters())
    assert "model.layers.0.self_attn.qkv_proj.weight" in parameters
    assert plan(parameters, layout).keys() == empty.keys()


def test_the_large_model_has_1_24_billion_parameters() -> None:
    empty = empty_tensors(one_billion_config(), torch.bfloat16)
    assert sum(tensor.numel() for tensor in empty.values()) == 1_235_814_400


async def test_bench_loader_unpickles_nothing_without_the_key() -> None:
    application = make_application(
        make_module({"weight": (2, 2)}, torch.float32), "secret"
    )
    async with TestClient(TestServer(application)) as client:
        body = {"serialized_named_tensors": ["not even base64"]}
        for headers in ({}, {"Authorization": "Bearer other"}):
            answer = await client.post(
                "/update_weights_from_tensor", json=body, headers=headers
            )
            assert answer.status == 401


TENSORS = {
    "model.layers.0.self_attn.q_proj.weight": (8, 4),
    "model.layers.0.self_attn.k_proj.weight": (2, 4),
    "model.layers.0.self_attn.v_proj.weight": (2, 4),
    "model.norm.weight": (4,),
}


class StandIn:
    """An engine made of scripted replies and the weight loader. While it is paused no
    reply goes on."""

    def __init__(self, layout: WeightLayout) -> None:
        self.is_paused = False
        self.replies = FakeEngine(random_reply(tokens=2000), token_delay_s=0.002)
        self.replies.holds = lambda _: self.is_paused
        self.application = make_application(
            make_module(engine_shapes(layout), torch.float32), "key"
        )
        self.application.add_routes(self.replies.routes())
        self.application.add_routes([web.post(PAUSE_PATH, self._pause)])
        self.application.add_routes([web.post("/continue_generation", self._resume)])

    async def _pause(self, _: web.Request) -> web.Response:
        self.is_paused = True
        return web.json_response({})

    async def _resume(self, _: web.Request) -> web.Response:
        self.is_paused = False
        return web.json_response({})


@pytest.fixture
async def updated() -> AsyncIterator[tuple[UpdatedEngine, SglangClient, StandIn]]:
    empty = {name: torch.empty(shape, device="meta") for name, shape in TENSORS.items()}
    sender = ChangingWeights(random_tensors(empty))
    stand_in = StandIn(await sender.layout())
    async with TestServer(stand_in.application) as server:
        limits = EngineLimits(vocab_size=512, context_length=4096)
        url = str(server.make_url("/"))
        async with SglangClient(
            url, limits=limits, api_key="key", admin_key="key"
        ) as client:
            receiver = ArenaReceiver("stand-in", client, ArenaWeights(timeout_s=60.0))
            engine = UpdatedEngine(
                sender, receiver, canary_prompts=(), dtype="float32", deadline_s=60.0
            )
            await engine.warm_up()
            yield engine, client, stand_in


async def test_weight_bench_measures_updates_with_requests_in_flight(
    updated: tuple[UpdatedEngine, SglangClient, StandIn],
) -> None:
    engine, client, _ = updated
    part = await measure_in_flight(engine, client, number=3, updates=2, deadline_s=60.0)
    assert part.failure == ""
    assert part.ratios.keys() == {
        "gap_3_in_place",
        "load_gap_3_in_place",
        "failed_requests_3",
        "unequal_tensors_3",
    }
    seconds = part.details["in_flight_3"]
    assert seconds["gap_s"]["median"] > seconds["decode_step_s"] > 0
    assert seconds["gap_s"]["longest"] >= seconds["phases"]["paused"]


async def test_request_cut_short_fails_the_bench(
    updated: tuple[UpdatedEngine, SglangClient, StandIn],
) -> None:
    engine, client, stand_in = updated
    stand_in.replies.aborts = 1
    part = await measure_in_flight(engine, client, number=3, updates=1, deadline_s=60.0)
    assert part.ratios["failed_requests_3"] == 1
    assert "aborted" in part.failure


async def test_missing_engine_tensors_fail_the_bench(
    updated: tuple[UpdatedEngine, SglangClient, StandIn],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _, _ = updated
    assert (await measure_idle(engine, name="idle", updates=2)).failure == ""
    update = engine.update

    async def updated_too_late(*, copy_s: float) -> TimedUpdate:
        """The trainer's weights change behind the update."""
        timed = await update(copy_s=copy_s)
        await engine.change_weights()
        return timed

    monkeypatch.setattr(engine, "update", updated_too_late)
    part = await measure_idle(engine, name="idle", updates=2)
    assert "8 tensors" in part.failure


async def test_failure_of_one_weight_measurement_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def on_loader(name: str, *_: object) -> Part:
        if name == "loader":
            raise ServerError("the loader died")
        return Part(ratios={name: 2.0}, details={})

    async def engine_fails(*_: object) -> None:
        raise ServerError("the engine died")

    async def broadcast_fails(*_: object) -> Part:
        raise ServerError("the receiver died")

    monkeypatch.setattr(weights, "_measure_on_loader", on_loader)
    monkeypatch.setattr(weights, "measure_broadcasts", broadcast_fails)
    monkeypatch.setattr(weights, "_start_engine", engine_fails)
    settings = WeightBenchSettings(
        model_path=str(make_tiny_model(tmp_path / "model")),
        engine_dtype="float32",
        device="cpu",
        weight_arena="copy",
        updates=1,
        repetitions=1,
        with_engine=True,
        with_1b=True,
        canary_prompts=(),
        deadline_s=1.0,
    )
    parts: list[Part] = []
    await weights.measure_weights(settings, parts.append)
    assert [part.failure for part in parts] == [
        "loader: the loader died",
        "broadcast: the receiver died",
        "engine: the engine died",
        "",
    ]
    assert parts[3].ratios == {"loader_1b": 2.0}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "--model-path"),
        (["--model-path", "MODEL", "--updates", "0"], "weights updates"),
        (
            ["--model-path", "MODEL", "--engine.dtype", "float16"],
            "weights engine_dtype",
        ),
        (["--model-path", "MODEL", "--no-engin"], "did you mean --no-engine"),
        (["--model-path", "MODEL", "--no-engine=yes"], "no such flag"),
        (["--model-path", "MODEL", "--device", "gpu"], "weights device"),
        (["--model-path", "MODEL", "--device", "cuda"], "add --no-engine"),
        (["--model-path", "MODEL", "--device", "cuda", "--no-engine"], "sees no GPU"),
    ],
)
def test_weight_bench_refuses_bad_arguments(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.weights.count_gpus", lambda: 0)
    model = str(make_tiny_model(tmp_path / "model"))
    command_line = [
        model if argument == "MODEL" else argument for argument in arguments
    ]
    assert run_with_exit_code(partial(benchmark_weights, command_line)) == 2
    assert reason in capsys.readouterr().err


def test_gpu_bench_compares_both_ends_and_the_memory_with_the_weight_bytes() -> None:
    details = {
        "copy_s": 0.5,
        "num_bytes": 1000,
        "phases": {"stage": 2.0, "load": 3.0, "pause": 7.0},
    }
    part = Part(ratios={"loader": 30.0}, details={"loader": details})
    measured = weights.with_gpu_ratios(part, "loader", memory_growth=250)
    assert measured.ratios == {
        "loader": 30.0,
        "loader_stage_and_load": 10.0,
        "loader_memory_growth": 0.25,
    }
