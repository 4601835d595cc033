"""Real Ray workers, the real gateway and buffer, on a fake engine: user code does its
worst, every rollout ends with its reason, and batches keep coming."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import uvicorn
from fakes import FakeEngine, random_reply
from running_gateway import PromptServer
from slow_cases import first_quick
from tiny_model import make_tiny_model

from invrl.buffer.config import BufferConfig, FailuresConfig
from invrl.buffer.process.buffer_actor import BufferActor
from invrl.buffer.process.buffer_handle import BufferHandle
from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.errors import PluginError
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.server.routes.app import make_app
from invrl.gateway.server.settings import GatewaySettings
from invrl.host.network.ports import free_port
from invrl.host.processes.process import still_running
from invrl.host.ray.actor import ActorOptions, start_actor
from invrl.rollout.config import RolloutConfig
from invrl.rollout.dispatch.rollout_handle import RolloutHandle
from invrl.rollout.workers.session_client import SessionClient
from invrl.rollout.workers.worker_actor import Assignment, WorkerSettings
from invrl.rollout.workers.worker_pool import RayWorker, WorkerPool
from invrl.store.run_store import RunStore
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types.batches import TakenBatch
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, RolloutSummary
from invrl.types.tasks import Task
from invrl.types.weights import WeightVersion

pytestmark = pytest.mark.usefixtures("ray_session")
ENV_KEY = "environment-key-of-the-test"
FUNCTIONS = "rollout_behaviours"
GROUP = 2


@dataclass
class Stack:
    url: str
    store: RunStore
    store_path: Path
    engine: FakeEngine

    def outcomes(self) -> dict[str, list[RolloutSummary | FailedRollout]]:
        """All that the gateway has committed, by task."""
        by_task = defaultdict(list)
        for _, outcome in self.store.outbox_after(0):
            by_task[outcome.task_id].append(outcome)
        return by_task


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def renderer(model: Path) -> Renderer:
    return load_renderer(str(model), 512)


@pytest.fixture
async def stack(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Stack]:
    """The gateway in this process, so that each test has a fresh one in no time."""
    store_path = tmp_path / "run.db"
    async with FakeEngine(random_reply()) as engine:
        settings = GatewaySettings.model_validate(
            {
                "port": free_port(),
                "router_url": engine.url,
                "env_key": ENV_KEY,
                "model_path": str(model),
                "model_name": "tiny",
                "store_path": str(store_path),
                "max_new_tokens": 64,
                "context_length": 1024,
                "vocab_size": 512,
            }
        )
        writer = RunStoreWriter(store_path)
        client = SglangClient(
            engine.url, limits=EngineLimits(vocab_size=512, context_length=1024)
        )
        app = make_app(
            settings,
            sampler=client,
            renderer=renderer,
            store=writer,
            on_shutdown=client.close,
        )
        served = {"timeout_graceful_shutdown": 1, "timeout_keep_alive": 600}
        config = uvicorn.Config(app, port=settings.port, log_level="warning", **served)
        server = PromptServer(config)
        serving = asyncio.create_task(server.serve())
        try:
            async with asyncio.timeout(60):
                while not server.started:
                    await asyncio.sleep(0.01)
            yield Stack(settings.url, RunStore(store_path), store_path, engine)
        finally:
            server.should_exit = True
            await serving
            writer.close()


def tasks_that(*behaviours: str) -> list[Task]:
    return [Task(id=does, payload={"does": does}) for does in behaviours]


@asynccontextmanager
async def rollouts(
    stack: Stack,
    first: list[Task],
    function: str = "rollout",
    max_staleness: int = 1,
    logs: Path | None = None,
    **changes: object,
) -> AsyncIterator[tuple[RolloutHandle, BufferHandle]]:
    """The rollout half, leasing `first` and then good tasks without end."""

    def tasks() -> Iterator[Task]:
        return itertools.chain(
            first, (Task(id=f"good{n}", payload={"does": "good"}) for n in range(10**6))
        )

    config = RolloutConfig.model_validate(
        {
            "rollout_function_path": f"{FUNCTIONS}:{function}",
            "rollout_batch_size": 2,
            "n_samples_per_prompt": GROUP,
            "rollout_concurrency": 8,
            "rollout_timeout_s": 60.0,
            "rollout_max_attempts": 2,
            **changes,
        }
    )
    actor = start_actor(
        "the buffer",
        BufferActor,
        ActorOptions(),
        BufferConfig(
            max_staleness=max_staleness,
            over_sampling_groups=4,
            group_filter="none",
            failures=FailuresConfig(reward=()),
        ),
        config,
        tasks_factory=tasks,
        run_store_path=stack.store_path,
    )
    buffer = BufferHandle(actor=actor, batch_timeout_s=240.0)
    await buffer.start()
    handle = RolloutHandle(
        config,
        buffer=buffer,
        gateway_url=stack.url,
        env_key=ENV_KEY,
        model="tiny",
        seed=0,
        logs=logs,
    )
    try:
        await handle.start()
        handle.dispatch()
        yield handle, buffer
    finally:
        await handle.stop()
        actor.kill()


async def batches(
    stack: Stack, handle: RolloutHandle, buffer: BufferHandle, versions: range
) -> list[TakenBatch]:
    """What the loop does, without training: one batch per version."""
    taken = []
    for version in versions:
        taken.append(await handle.guard(buffer.take()))
        await buffer.trained(taken[-1].batch_id)
        stack.engine.version = version
        await buffer.advance(WeightVersion(version))
    return taken


async def until_ended(
    stack: Stack, tasks: list[Task], rollouts_each: int, seconds: float = 240.0
) -> None:
    end = time.monotonic() + seconds
    while any(len(stack.outcomes()[task.id]) < rollouts_each for task in tasks):
        assert time.monotonic() < end, f"these have ended: {stack.outcomes()}"
        await asyncio.sleep(0.1)


def own_ends(
    outcomes: list[RolloutSummary | FailedRollout],
) -> list[RolloutSummary | FailedRollout]:
    """Without the rollouts that were cancelled because another had cost them their
    group."""
    return [
        outcome
        for outcome in outcomes
        if getattr(outcome, "reason", None) is not FailureReason.GROUP_DROPPED
    ]


async def test_every_failed_rollout_has_a_reason_and_the_run_continues(
    stack: Stack,
) -> None:
    bad = tasks_that("raise", "nan", "wrong type", "hang", "nothing")
    # What hangs has made a turn before: it would be cancelled as stale before its
    # deadline.
    async with rollouts(stack, bad, max_staleness=8, rollout_timeout_s=15.0) as (
        handle,
        buffer,
    ):
        for taken in await batches(stack, handle, buffer, range(1, 4)):
            assert len(taken.groups) == 2
            assert all(group.task_id.startswith("good") for group in taken.groups)
            assert all(len(group.rollouts_G) == GROUP for group in taken.groups)
        await until_ended(stack, bad, rollouts_each=GROUP)
        ended = stack.outcomes()
        assert handle._pool.replaced == 0
    seen = {
        task.id: {
            getattr(outcome, "reason", "none") for outcome in own_ends(ended[task.id])
        }
        for task in bad
    }
    assert seen == {
        "raise": {FailureReason.EXCEPTION},
        "nan": {FailureReason.BAD_REWARD},
        "wrong type": {FailureReason.BAD_RETURN},
        "hang": {FailureReason.TIMEOUT},
        "nothing": {FailureReason.EMPTY},
    }
    assert "no such tool" in own_ends(ended["raise"])[0].detail
    good = [
        outcome
        for id, outcomes in ended.items()
        if id.startswith("good")
        for outcome in outcomes
    ]
    assert {
        outcome.reward_components["letters"] > 0
        for outcome in good
        if hasattr(outcome, "reward")
    } == {True}


async def test_worker_that_exits_is_replaced_and_the_run_continues(
    stack: Stack,
) -> None:
    exits = tasks_that("exit")
    async with rollouts(stack, exits, workers={"count": 2}) as (handle, buffer):
        await batches(stack, handle, buffer, range(1, 2))
        # The second place's last try is not made if the first place's has already cost
        # the group.
        await until_ended(stack, exits, rollouts_each=2 * GROUP - 1)
        await batches(stack, handle, buffer, range(2, 4))
        # Two rounds of two: those of a round may have died together or one by one.
        assert 2 <= handle._pool.replaced <= 4
        # what still waits for its worker at the end is aborted by it
        ended = stack.outcomes()["exit"]
    assert {outcome.reason for outcome in own_ends(ended)} == {
        FailureReason.WORKER_DIED
    }
    tries = [(o.index, o.attempt) for o in ended]
    assert len(set(tries)) == len(tries), "no place had the same try twice"
    assert {(0, 0), (1, 0)} < set(tries) <= {(0, 0), (0, 1), (1, 0), (1, 1)}


async def test_process_started_by_a_rollout_ends_with_its_worker(
    stack: Stack, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    forks = [Task(id="forks", payload={"does": "fork and exit", "file": str(pids)})]
    async with rollouts(stack, forks) as (handle, buffer):
        await batches(stack, handle, buffer, range(1, 2))
        await until_ended(stack, forks, rollouts_each=1)
        started = pids.read_text().split()
        assert started
        go_on = []
        for pid in started:
            with suppress(psutil.NoSuchProcess):
                go_on.append(psutil.Process(int(pid)))
        left = await asyncio.to_thread(still_running, go_on, within_s=120)
        assert left == [], "children of a dead worker go on"


@pytest.mark.parametrize(
    ("does", "gigabytes", "reason"),
    first_quick(
        [
            ("leak", 1.1, FailureReason.MEMORY),
            ("leak and block", 1.5, FailureReason.WORKER_DIED),
        ]
    ),
)
async def test_worker_over_its_memory_is_replaced_and_the_run_continues(
    stack: Stack, does: str, gigabytes: float, reason: FailureReason
) -> None:
    leaks = [Task(id="leaks", payload={"does": does, "bytes": gigabytes * 1e9})]
    changes = {"workers": {"memory_gb": 1.0}, "rollout_max_attempts": 1}
    async with rollouts(stack, leaks, **changes) as (handle, buffer):
        await until_ended(stack, leaks, rollouts_each=GROUP)
        await batches(stack, handle, buffer, range(1, 3))
        assert handle._pool.replaced >= 1
    ended = own_ends(stack.outcomes()["leaks"])
    assert {outcome.reason for outcome in ended} == {reason}
    if reason is FailureReason.MEMORY:
        assert {"the worker held 1." in outcome.detail for outcome in ended} == {True}
        assert {"workers.memory_gb is 1" in outcome.detail for outcome in ended} == {
            True
        }


async def test_rollout_that_cancels_all_tasks_of_its_worker_counts_as_one_death(
    stack: Stack,
) -> None:
    cancels = tasks_that("cancel all")
    async with rollouts(stack, cancels) as (handle, buffer):
        await until_ended(stack, cancels, rollouts_each=GROUP)
        await batches(stack, handle, buffer, range(1, 3))
        # what still runs at the end is aborted by it
        ended = stack.outcomes()["cancel all"]
    reasons = {outcome.reason for outcome in own_ends(ended)}
    assert reasons <= {FailureReason.WORKER_DIED, FailureReason.EXCEPTION}


async def test_key_printed_by_user_code_reaches_neither_the_store_nor_a_log(
    stack: Stack,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    told = tmp_path / "key"
    logs = tmp_path / "logs"
    logs.mkdir()
    tells = [Task(id="tells", payload={"does": "tell", "file": str(told)})]
    with caplog.at_level("DEBUG"):
        async with rollouts(stack, tells, rollout_max_attempts=1, logs=logs) as (
            handle,
            buffer,
        ):
            await batches(stack, handle, buffer, range(1, 2))
            await until_ended(stack, tells, rollouts_each=GROUP)
    key = told.read_text()
    assert len(key) > 20
    details = {outcome.detail for outcome in own_ends(stack.outcomes()["tells"])}
    assert details
    assert all(
        "cannot reach" in detail and "(session key)" in detail for detail in details
    )
    # What it prints is in the run folder.
    assert "the key is (session key)\n" in (logs / "rollout-worker-0.log").read_text()
    for file in stack.store_path.parent.rglob("*"):
        if file.is_file() and file != told:
            assert key.encode() not in file.read_bytes(), file
    assert key not in caplog.text
    shown = capfd.readouterr()
    assert key not in shown.out + shown.err


async def test_output_of_a_dead_worker_is_kept_and_a_silent_worker_leaves_no_file(
    stack: Stack, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    exits = [Task(id="exits", payload={"does": "print and exit"})]
    async with rollouts(stack, exits, logs=logs, rollout_max_attempts=1) as (
        handle,
        buffer,
    ):
        await batches(stack, handle, buffer, range(1, 2))
        await until_ended(stack, exits, rollouts_each=GROUP)
        assert handle._pool.replaced >= 1
    printed = {file.name: file.read_text() for file in logs.iterdir()}
    assert printed["rollout-worker-0.log"].startswith("before the end\n")
    assert all("before the end\n" in text for text in printed.values())


@pytest.mark.slow
async def test_sync_rollout_functions_run_and_a_hung_function_times_out(
    stack: Stack,
) -> None:
    hangs = tasks_that("hang")
    async with rollouts(
        stack, hangs, function="sync_rollout", rollout_timeout_s=12.0
    ) as (handle, buffer):
        (taken,) = await batches(stack, handle, buffer, range(1, 2))
        assert [r.num_turns for group in taken.groups for r in group.rollouts_G] == [
            2
        ] * 4
        await until_ended(stack, hangs, rollouts_each=GROUP)
        ended = stack.outcomes()["hang"]
        # Its threads cannot be ended, so the worker was, once its reply had come.
        async with asyncio.timeout(60):
            while handle._pool.replaced < 1:
                await asyncio.sleep(0.05)
        await batches(stack, handle, buffer, range(2, 4))
    assert {outcome.reason for outcome in own_ends(ended)} == {FailureReason.TIMEOUT}


@pytest.mark.parametrize("function", first_quick(["rollout", "sync_rollout"]))
async def test_rollouts_of_a_dropped_group_are_cancelled_and_free_their_slots(
    stack: Stack, tmp_path: Path, function: str
) -> None:
    """One member of each group raises, the other would go on for an hour; there are
    twice as many of these as slots."""
    groups = [
        Task(
            id=f"half{n}",
            payload={"does": "first raises", "file": str(tmp_path / f"half{n}")},
        )
        for n in range(4)
    ]
    changes = {
        "rollout_max_attempts": 1,
        "rollout_concurrency": 2,
        "rollout_timeout_s": 3600.0,
    }
    async with rollouts(stack, groups, function=function, **changes) as (
        handle,
        buffer,
    ):
        for taken in await batches(stack, handle, buffer, range(1, 4)):
            assert all(group.task_id.startswith("good") for group in taken.groups)
        ended = stack.outcomes()
        assert handle._pool.replaced == 0
    for task in groups:
        reasons = [getattr(outcome, "reason", "none") for outcome in ended[task.id]]
        assert sorted(reasons) == [FailureReason.EXCEPTION, FailureReason.GROUP_DROPPED]
    dropped = {
        outcome.detail
        for outcomes in ended.values()
        for outcome in outcomes
        if outcome not in own_ends([outcome])
    }
    assert {detail.partition("was dropped")[2] for detail in dropped} == {
        " (incomplete): this rollout is no longer needed"
    }


async def test_group_rollout_function_sees_its_whole_group(stack: Stack) -> None:
    async with rollouts(stack, [], function="group_rollout") as (handle, buffer):
        taken = await handle.guard(buffer.take())
    for group in taken.groups:
        assert min(rollout.reward for rollout in group.rollouts_G) == 0.0


async def test_evaluation_runs_during_rollouts_and_does_not_touch_the_buffer(
    stack: Stack, tmp_path: Path
) -> None:
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text('{"id": "e1", "does": "good"}\n{"id": "e2", "does": "raise"}\n')
    changes = {
        "eval": {"task_file": str(held_out), "tasks": 2, "samples_per_task": 3},
    }
    async with rollouts(stack, [], **changes) as (handle, _):
        result = await handle.evaluate(0)
    sampled, greedy = result.scores.values()
    assert (sampled.samples, greedy.samples) == (6, 2)
    assert sampled.failures == {"exception": 3}
    assert not set(stack.outcomes()) & {"e1", "e2"}


async def test_missing_rollout_function_is_reported_at_the_start() -> None:
    settings = WorkerSettings(
        gateway_url="http://127.0.0.1:1",
        model="tiny",
        rollout=RolloutConfig(
            rollout_function_path=f"{FUNCTIONS}:rolout", rollout_timeout_s=1.0
        ),
        python_path=tuple(sys.path),
    )
    worker = RayWorker(settings, "worker", concurrency=4)
    with pytest.raises(PluginError, match="did you mean 'rollout'"):
        await worker.ready(120.0)
    worker.kill()


async def test_worker_with_a_blocked_event_loop_is_killed(stack: Stack) -> None:
    client = SessionClient(stack.url, env_key=ENV_KEY)
    settings = WorkerSettings(
        gateway_url=stack.url,
        model="tiny",
        rollout=RolloutConfig(
            rollout_function_path=f"{FUNCTIONS}:rollout", rollout_timeout_s=8.0
        ),
        python_path=tuple(sys.path),
    )
    pool = WorkerPool(
        lambda name: RayWorker(settings, name, concurrency=8),
        client,
        size=1,
        run_timeout_s=12.0,
    )
    await pool.start()

    async def run(does: str) -> RolloutSummary | FailedRollout:
        (task,) = tasks_that(does)
        lease = GroupLease(
            group_id=does, task=task, members=(GroupMember(index=0, attempt=0),)
        )
        (outcome,) = await pool.run(
            Assignment(task=task, sessions=tuple(await client.open(lease)))
        )
        return outcome

    try:
        slow = await run("blocks for a while")
        assert isinstance(slow, FailedRollout)
        assert slow.reason is FailureReason.TIMEOUT
        assert pool.replaced == 0
        blocked = asyncio.create_task(run("block"))
        ended = await blocked
        assert isinstance(ended, FailedRollout)
        assert ended.reason is FailureReason.TIMEOUT
        assert pool.replaced == 1
        assert isinstance(await run("good"), RolloutSummary)
    finally:
        pool.stop()
        await client.close()
