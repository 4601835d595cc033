"""What the gateway's bench is made of: the paced stand-in engine, arrivals, loads that
count what fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest
from streamed import collect

from benchmarks.gateway_load.load import Script, arrivals, closed_loop, open_loop
from benchmarks.gateway_load.paced_engine import Connection, PacedEngine, fixed_logprob
from invrl.engines.client.generation import GenerateRequest
from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.errors import ServerError
from invrl.types.sessions import Sampling

SCRIPT = Script(tokens=8, chat=[[], []], prompts=[[], []])


@pytest.fixture
def engine() -> PacedEngine:
    return PacedEngine([11, 12, 13])


@pytest.fixture
async def client(engine: PacedEngine) -> AsyncIterator[SglangClient]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with SglangClient(
        url, limits=EngineLimits(vocab_size=99, context_length=99)
    ) as client:
        yield client
    server.close()


async def test_fake_engine_of_the_bench_streams_in_events_of_any_size(
    engine: PacedEngine, client: SglangClient
):
    engine.pace_s = 0.01
    request = GenerateRequest(
        rid="r",
        input_ids_T=np.array([1, 2], np.int32),
        sampling=Sampling(max_new_tokens=5),
    )
    started = time.monotonic()
    coarse, whole = await collect(
        client.stream(msgspec.structs.replace(request, stream_interval=3))
    )
    assert time.monotonic() - started >= 5 * engine.pace_s
    assert [len(chunk.ids_T) for chunk in coarse] == [1, 3, 1]
    chunks, result = await collect(client.stream(request))
    for reply in (whole, result):
        assert reply.ids_T.tolist() == [11, 12, 13, 11, 12]
        assert reply.logprobs_T.tolist() == pytest.approx(
            [fixed_logprob(id) for id in reply.ids_T.tolist()]
        )
    assert whole.finish_reason == "length"
    assert chunks[-1].spans[-1].end == 5


def test_arrivals_are_a_poisson_process_of_the_set_rate() -> None:
    due_s = np.array(arrivals(rate=200, seconds=100, seed=3))
    gaps = np.diff(due_s)
    assert np.all(gaps > 0)
    assert due_s[-1] < 100
    assert len(due_s) == pytest.approx(20_000, rel=0.03)
    # as in an exponential distribution
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)
    assert arrivals(rate=200, seconds=1, seed=3) == due_s[due_s < 1].tolist()


async def test_delay_of_the_load_generator_counts_as_latency_and_turns_stay_in_order():
    asked: list[tuple[int, int]] = []

    async def ask(session: int, turn: int) -> float:
        asked.append((session, turn))
        if len(asked) == 1:
            # stops this whole process: what is due meanwhile leaves late
            time.sleep(0.05)
        return time.perf_counter()

    measured = await open_loop(ask, SCRIPT, due_s=[0.0, 0.001, 0.002])
    assert asked == [(0, 0), (1, 0), (0, 1)]
    assert min(measured.whole_s) >= 0.04
    assert measured.tokens == 24


async def test_failed_requests_are_counted_and_give_no_tokens():
    async def ask(session: int, turn: int) -> float:
        if (session, turn) == (1, 1):
            raise ServerError("no")
        return time.perf_counter()

    measured = await closed_loop(ask, SCRIPT, agents=2, rounds=2)
    assert len(measured.errors) == 1
    assert len(measured.whole_s) == 7
    assert measured.tokens == 56
