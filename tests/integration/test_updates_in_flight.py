"""What an update does to requests in flight: the version on every token is true, and
cached keys and values serve only the version that computed them.

The reference is transformers' model with the weights of each version. For tokens whose
context was computed under several versions it keeps its own keys and values, as the
engine does.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from streamed import Generated, collect
from torch_trainer import TorchSender
from torch_updates import CANARY, Update
from transformers import DynamicCache, PreTrainedModel

from invrl.engines.client import weight_receiver
from invrl.engines.client.generation import GenerateRequest
from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.client.weight_receiver import ArenaReceiver
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.host.processes.fork_parent import ForkParent
from invrl.types.sessions import Sampling
from invrl.types.turns import VersionSpan
from invrl.weights.config import ArenaWeights

NUM_STREAMS = 8
MOST_RUNNING = NUM_STREAMS + len(CANARY)
"""Of the engine that keeps caches in place."""
NUM_UPDATES = 50
NUM_TOKENS = 400
"""Of a stream: it lives through a few updates."""
CHANGE = 0.02
"""Of the weights between two versions. Their log-probs differ by far more than the
bound."""
BOUND = 1e-3
RETRACT, IN_PLACE, DRAIN = (
    {"inflight": mode} for mode in ("retract", "in_place", "drain")
)
SHORT_DRAIN = {**DRAIN, "drain_timeout_s": 0.1}


@dataclass
class Updates:
    """Updates of the shared engine in one mode. Keeps the model of every version."""

    update: Update
    router: SglangClient
    models: dict[int, PreTrainedModel] = field(default_factory=dict)

    async def next(self) -> None:
        self.update.sender.train(Update.version, size=CHANGE)
        await self.update.run()
        self.models[Update.version] = copy.deepcopy(self.update.sender.model)

    async def sample(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        begun: asyncio.Event | None = None,
        on_chunk: Callable[[], object] = lambda: None,
    ) -> Generated:
        request = GenerateRequest(
            rid=f"in-flight-{np.random.randint(1 << 40)}",
            input_ids_T=np.array(prompt, np.int32),
            sampling=Sampling(max_new_tokens=num_tokens),
            ignore_eos=True,
        )
        each = on_chunk if begun is None else begun.set
        _, result = await collect(self.router.stream(request), each=each)
        assert (result.finish_reason, len(result.ids_T)) == ("length", num_tokens)
        return result

    def gap(
        self, prompt: Sequence[int], result: Generated, *, keeps_cache: bool
    ) -> float:
        """The largest difference between the engine's log-probs and those of the
        version that each token claims. `keeps_cache`: of a context whose keys and
        values older versions have computed."""
        ids = [*prompt, *result.ids_T.tolist()]
        reference = _kept_logprobs if keeps_cache else _recomputed_logprobs
        expected_T = reference(self.models, ids, len(prompt), result.spans)
        return float(np.abs(expected_T - result.logprobs_T).max())


def _recomputed_logprobs(
    models: dict[int, PreTrainedModel],
    ids: list[int],
    num_prompt: int,
    spans: Sequence[VersionSpan],
) -> NDArray[np.float32]:
    """The whole context of a token is computed under its own version."""
    parts: list[NDArray[np.float32]] = []
    for span in spans:
        with torch.no_grad():
            logits = models[span.version](torch.tensor([ids[:-1]])).logits[0]
        first = num_prompt - 1
        parts.append(
            _picked(
                logits[first + span.start : first + span.end],
                ids,
                num_prompt + span.start,
            )
        )
    return np.concatenate(parts)


def _kept_logprobs(
    models: dict[int, PreTrainedModel],
    ids: list[int],
    num_prompt: int,
    spans: Sequence[VersionSpan],
) -> NDArray[np.float32]:
    """A token of the context was computed once, under the version that sampled the
    token after it."""
    cache = DynamicCache()
    parts: list[NDArray[np.float32]] = []
    num_computed = 0
    for span in spans:
        end = num_prompt + span.end - 1
        with torch.no_grad():
            chunk = torch.tensor([ids[num_computed:end]])
            logits = models[span.version](
                chunk, past_key_values=cache, use_cache=True
            ).logits[0]
        parts.append(
            _picked(logits[span.start - span.end :], ids, num_prompt + span.start)
        )
        num_computed = end
    return np.concatenate(parts)


def _picked(logits_TV: torch.Tensor, ids: list[int], first: int) -> NDArray[np.float32]:
    """The log-probs of the tokens from `first` on."""
    chosen_T = torch.tensor(ids[first : first + len(logits_TV)])
    return (
        torch.log_softmax(logits_TV.float(), -1)
        .gather(1, chosen_T[:, None])[:, 0]
        .numpy()
    )


@pytest.fixture(scope="module")
async def fleet_in_place(
    tiny_model: Path,
    engine_parent: ForkParent,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Fleet]:
    """Its engine starts as this mode needs it."""
    config = EngineConfig.model_validate({"dtype": "float32", "start_timeout_s": 500.0})
    settings = ArenaWeights.model_validate(IN_PLACE)
    folder = tmp_path_factory.mktemp("in_place")
    most_running = {"max-running-requests": str(MOST_RUNNING)}
    fleet = Fleet(
        config,
        tiny_model,
        folder,
        sglang=most_running,
        weights=settings,
        parent=engine_parent,
    )
    try:
        await fleet.start()
        await fleet.admit()
        yield fleet
    finally:
        await fleet.stop()


@pytest.fixture
async def updates(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    tiny_fleet: Fleet,
    fleet_in_place: Fleet,
) -> AsyncIterator[Updates]:
    """By the settings of the test's parameter."""
    fleet = fleet_in_place if request.param is IN_PLACE else tiny_fleet
    engine = fleet.engines["engine-0"]
    receiver = ArenaReceiver(
        "engine-0", engine.client, ArenaWeights.model_validate(request.param)
    )
    router = SglangClient(
        fleet.router.url,
        limits=fleet.limits,
        api_key=fleet.router.api_key,
        name="router",
    )
    async with router:
        updates = Updates(Update(TorchSender(tiny_model), [receiver]), router)
        await updates.next()
        yield updates


@pytest.mark.parametrize(
    "updates",
    [RETRACT, pytest.param(IN_PLACE, marks=pytest.mark.slow)],
    ids=["retract", "in_place"],
    indirect=True,
)
async def test_every_token_of_8_streams_has_its_true_version_over_50_updates(
    updates: Updates,
    request: pytest.FixtureRequest,
) -> None:
    keeps_cache = "in_place" in request.node.name
    is_over = False
    finished: list[tuple[list[int], Generated]] = []

    async def stream(index: int, begun: asyncio.Event) -> None:
        turn = 0
        while not is_over:
            prompt = [1, 100 + index, 20 + turn % 200, 30, 40]
            finished.append((prompt, await updates.sample(prompt, NUM_TOKENS, begun)))
            turn += 1

    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
    async with asyncio.timeout(600), asyncio.TaskGroup() as tasks:
        for index in range(NUM_STREAMS):
            tasks.create_task(stream(index, begun[index]))
        await asyncio.gather(*(event.wait() for event in begun))
        for _ in range(NUM_UPDATES):
            await updates.next()
        is_over = True
    sampled = {span.version for _, result in finished for span in result.spans}
    assert len(sampled) > NUM_UPDATES / 2
    assert sum(len(result.spans) > 1 for _, result in finished) >= NUM_STREAMS
    gaps = [
        updates.gap(prompt, result, keeps_cache=keeps_cache)
        for prompt, result in finished
    ]
    assert max(gaps) <= BOUND
    if keeps_cache:
        # What it costs to keep them: the log-probs are not those of any one version.
        to_one_version = max(
            updates.gap(prompt, result, keeps_cache=False)
            for prompt, result in finished
        )
        assert to_one_version > 10 * BOUND


@pytest.mark.parametrize("updates", [IN_PLACE], ids=["in_place"], indirect=True)
async def test_new_requests_do_not_reuse_the_cache_of_older_weights(
    updates: Updates,
) -> None:
    """Neither what had ended before an update, nor what was in flight."""
    ended = list(range(100, 200))
    in_flight = list(range(200, 300))
    await updates.sample(ended, 1)
    assert (await updates.sample(ended, 1)).cached_tokens > 90
    begun = asyncio.Event()
    flight = asyncio.create_task(updates.sample(in_flight, 500, begun))
    await begun.wait()
    await updates.next()
    for prompt in (ended, in_flight):
        first = await updates.sample(prompt, 4)
        assert first.cached_tokens == 0
        assert updates.gap(prompt, first, keeps_cache=False) <= BOUND
        assert (await updates.sample(prompt, 4)).cached_tokens > 90
    crossed = await flight
    assert [span.version for span in crossed.spans] == [
        Update.version - 1,
        Update.version,
    ]
    path = [*in_flight, *crossed.ids_T.tolist()]
    continued = await updates.sample(path, 4)
    assert continued.cached_tokens <= len(in_flight) + 4
    assert updates.gap(path, continued, keeps_cache=False) <= BOUND


@pytest.mark.parametrize("updates", [DRAIN], ids=["drain"], indirect=True)
async def test_drain_lets_running_requests_end_and_holds_new_requests(
    updates: Updates,
) -> None:
    prompts = [[1, 100 + index, 20, 30, 40] for index in range(3)]
    before = Update.version
    begun = [asyncio.Event() for _ in prompts]
    running = [
        asyncio.create_task(updates.sample(prompt, 600, event))
        for prompt, event in zip(prompts, begun, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    updating = asyncio.create_task(updates.next())
    late: list[asyncio.Task[Generated]] = []
    while not updating.done():
        late.append(asyncio.create_task(updates.sample([7, 7, len(late)], 8)))
        await asyncio.sleep(0.1)
    await updating
    for prompt, task in zip(prompts, running, strict=True):
        result = await task
        assert [span.version for span in result.spans] == [before]
        assert updates.gap(prompt, result, keeps_cache=False) <= BOUND
    versions = [[span.version for span in (await task).spans] for task in late]
    assert [Update.version] in versions
    assert all(len(spans) == 1 for spans in versions)


@pytest.mark.parametrize("updates", [SHORT_DRAIN], ids=["short"], indirect=True)
async def test_request_that_outlasts_the_drain_is_retracted(
    updates: Updates, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = [1, 20, 30, 40]
    begun = asyncio.Event()
    running = asyncio.create_task(updates.sample(prompt, 700, begun))
    await begun.wait()
    await updates.next()
    result = await running
    assert [span.version for span in result.spans] == [
        Update.version - 1,
        Update.version,
    ]
    assert updates.gap(prompt, result, keeps_cache=False) <= BOUND
    assert "did not end within 0.1 s" in caplog.text


@pytest.mark.parametrize("updates", [RETRACT], ids=["retract"], indirect=True)
async def test_canary_is_computed_before_retracted_requests(
    updates: Updates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 contexts have to be computed again. Only what shares the canary's first steps
    is before it."""
    [receiver] = await updates.update.transaction.receivers()
    ask = receiver.logprobs
    resume = receiver.resume
    chunks: Counter[int] = Counter()
    chunks_at_resume: Counter[int] = Counter()
    before_canary: list[int] = []

    async def resume_and_count() -> None:
        chunks_at_resume.update(chunks)
        await resume()

    async def ask_and_count(
        prompts: Sequence[Sequence[int]],
    ) -> list[NDArray[np.float32]]:
        answer = await ask(prompts)
        before_canary.extend(
            index for index in chunks if chunks[index] > chunks_at_resume[index]
        )
        return answer

    monkeypatch.setattr(receiver, "resume", resume_and_count)
    monkeypatch.setattr(receiver, "logprobs", ask_and_count)
    async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
        for index in range(64):
            prompt = np.random.default_rng(index).integers(5, 500, 120).tolist()
            on_chunk = partial(chunks.update, [index])
            tasks.create_task(updates.sample(prompt, 100, on_chunk=on_chunk))
        while len(chunks) < 64:
            await asyncio.sleep(0.05)
        await updates.next()
    assert len(before_canary) <= 16


@pytest.mark.parametrize("updates", [IN_PLACE], ids=["in_place"], indirect=True)
async def test_full_engine_makes_room_for_the_canary(
    updates: Updates, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_receiver, "_ROOM_DEADLINE_S", 1.0)
    prompts = [[1, 100 + index, 20, 30, 40] for index in range(MOST_RUNNING)]
    begun = [asyncio.Event() for _ in prompts]
    running = [
        asyncio.create_task(updates.sample(prompt, 600, event))
        for prompt, event in zip(prompts, begun, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    await updates.next()
    assert "no room for the canary" in caplog.text
    assert not any(task.done() for task in running)
    for task in running:
        assert {span.version for span in (await task).spans} == {
            Update.version - 1,
            Update.version,
        }
