"""A group is stale as soon as a rollout that still runs holds a token that is too old:
nobody waits until a member of it has finished."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
from running_gateway import ASK, MORE, Running, eventually, running
from small_buffer import failed, finished

from invrl.buffer.config import BufferConfig
from invrl.buffer.groups.group_buffer import GroupBuffer
from invrl.buffer.ledger.ledger_store import read_ledger
from invrl.buffer.ledger.open_group import RolloutState
from invrl.buffer.process import buffer_actor
from invrl.buffer.process.buffer_actor import BufferActor
from invrl.gateway.rendering.renderer import Renderer
from invrl.rollout.config import RolloutConfig
from invrl.types.groups import DroppedGroup
from invrl.types.leases import GroupLease, Place
from invrl.types.reasons import DropReason, FailureReason
from invrl.types.rollouts import RolloutSummary, SampledSoFar
from invrl.types.sessions import Session
from invrl.types.tasks import Task
from invrl.types.weights import WeightVersion

G1_IS_STALE = (DroppedGroup(group_id="g1", reason=DropReason.STALE),)


def endless() -> Iterator[Task]:
    return (Task(id=f"t{n}", payload={}) for n in itertools.count())


def make_buffer(*, staleness: int = 0, over: int = 1) -> GroupBuffer:
    return GroupBuffer(
        BufferConfig(max_staleness=staleness, over_sampling_groups=over),
        RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=2),
        tasks=endless(),
        group_filter=lambda group: None,
    )


def train_g0(buffer: GroupBuffer) -> None:
    """Both groups are leased; the first one's rollouts finish, it is trained, and the
    version advances."""
    while buffer.lease() is not None:
        pass
    for index in range(2):
        buffer.record(
            finished(Place("g0", index, 0), reward=float(index), oldest=0, newest=0)
        )
    batch = buffer.take()
    assert batch is not None
    assert [group.id for group in batch.groups] == ["g0"]
    buffer.trained(batch.batch_id)
    buffer.advance(WeightVersion(1))


def sampled(
    index: int, version: int, *, group: str = "g1", attempt: int = 0
) -> SampledSoFar:
    return SampledSoFar(
        place=Place(group, index, attempt), oldest_version=WeightVersion(version)
    )


def test_running_rollout_with_a_stale_token_drops_its_group() -> None:
    buffer = make_buffer()
    train_g0(buffer)
    assert buffer.unwanted() == ()
    assert buffer.suspects() == ["g1"]
    buffer.note_sampled([sampled(0, 1)])
    assert buffer.unwanted() == ()
    buffer.note_sampled([sampled(0, 1), sampled(1, 0)])
    assert buffer.unwanted() == G1_IS_STALE
    assert buffer.events.dropped == {"stale": 1}
    assert buffer.suspects() == []
    # said once more, by a look that had begun before
    buffer.note_sampled([sampled(0, 0)])
    assert buffer.events.dropped == {"stale": 1}


def test_no_running_rollout_is_suspect_within_the_staleness_bound() -> None:
    buffer = make_buffer(staleness=1)
    train_g0(buffer)
    assert buffer.suspects() == []
    buffer.note_sampled([sampled(1, 0)])
    assert buffer.unwanted() == ()


def test_tokens_of_an_earlier_attempt_do_not_count() -> None:
    buffer = make_buffer()
    train_g0(buffer)
    buffer.record(failed(Place("g1", 1, 0), FailureReason.EXCEPTION))
    assert buffer.lease() is not None  # its replacement, under version 1
    buffer.note_sampled([sampled(1, 0), sampled(7, 0), sampled(0, 0, group="g9")])
    assert buffer.unwanted() == ()
    assert buffer.suspects() == ["g1"], "its other member runs since version 0"


# ----------------------------------------------------------- from the gateway's store


@pytest.fixture
async def gateway(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Running]:
    async with running(tmp_path, model, renderer, constrained="skip") as gateway:
        yield gateway


@asynccontextmanager
async def buffering(
    path: Path, *, trains_all_roots: bool = True
) -> AsyncIterator[BufferActor]:
    actor = BufferActor(
        BufferConfig(max_staleness=0),
        RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=2),
        tasks_factory=endless,
        run_store_path=path,
        trains_all_roots=trains_all_roots,
        poll_interval_s=0.001,
    )
    await actor.start()
    yield actor
    await actor.close()


async def sessions_of(gateway: Running, lease: GroupLease | None) -> list[Session]:
    assert lease is not None
    return await gateway.open(members=2, task_id=lease.task.id, group_id=lease.group_id)


async def say(
    gateway: Running, session: Session, *, then: bool = False, **options: object
) -> None:
    messages: list = (
        [ASK, {"role": "assistant", "content": "hm"}, MORE] if then else [ASK]
    )
    chat = gateway.client(session).chat.completions
    await chat.create(model="tiny", messages=messages, **options)  # type: ignore[call-overload]


async def test_stale_group_is_dropped_before_its_rollouts_have_ended(
    gateway: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn is known only after the version has advanced, so the look after the
    advance finds nothing and a later one does."""
    monkeypatch.setattr(buffer_actor, "_SUSPECTS_EVERY_S", 0.01)
    async with buffering(tmp_path / "run.db") as actor:
        talking, silent = await sessions_of(gateway, await actor.lease())
        unwanted = asyncio.create_task(actor.unwanted())
        await actor.advance(WeightVersion(1))
        assert await actor.lease() is None, "the group in flight takes the only place"
        await say(gateway, talking)  # the fake engine is at version 0 still
        stale = DroppedGroup(group_id="g0", reason=DropReason.STALE)
        assert await asyncio.wait_for(unwanted, 300) == (stale,)
        assert isinstance(await gateway.finish(talking), RolloutSummary)
        await gateway.env(
            f"/sessions/{silent.id}/abort", {"reason": "group_dropped", "detail": ""}
        )
        lease = await actor.lease()
        assert lease is not None
        assert lease.group_id == "g1"
    kept = [record.entry for record in read_ledger(tmp_path / "run.db")]
    ends = {
        entry.place: entry.reason
        for entry in kept
        if entry.state is RolloutState.DROPPED
    }
    assert ends[Place("g0", 0, 0)] is DropReason.STALE
    assert ends[Place("g0", 1, 0)] is DropReason.STALE


async def test_running_rollouts_are_not_dropped_if_only_main_conversations_train(
    gateway: Running, tmp_path: Path
) -> None:
    async with buffering(tmp_path / "run.db", trains_all_roots=False) as actor:
        talking, _ = await sessions_of(gateway, await actor.lease())
        await say(gateway, talking)
        await actor.advance(WeightVersion(1))
        await actor._drop_stale_in_flight()
        assert actor._buffer.unwanted() == ()
        await gateway.finish(talking)
        assert await actor.unwanted() == (
            DroppedGroup(group_id="g0", reason=DropReason.STALE),
        )


async def test_a_turn_that_reached_nobody_makes_no_rollout_old(
    gateway: Running, tmp_path: Path
) -> None:
    [session] = await gateway.open()
    await say(gateway, session)
    await eventually(
        lambda: gateway.store.sampled_so_far(["g"]) == [sampled(0, 0, group="g")]
    )
    with contextlib.closing(
        sqlite3.connect(tmp_path / "run.db", isolation_level=None)
    ) as db:
        db.execute("UPDATE turns SET delivered=0")
    assert gateway.store.sampled_so_far(["g"]) == []


async def test_store_reports_the_versions_that_the_summary_will_have(
    gateway: Running,
) -> None:
    """Delivered turns of the session and of its children count. Turns that were aborted
    or forced by a grammar do not, and neither do other groups, evaluations and what has
    ended."""
    gateway.engine.version = 3
    first, second = await gateway.open(members=2)
    [elsewhere] = await gateway.open(group_id="other")
    [evaluation] = await gateway.open(purpose="eval")
    for session in (elsewhere, evaluation):
        await say(gateway, session)
    assert gateway.store.sampled_so_far(["g"]) == []

    # constrained: not trained
    await say(gateway, second, response_format={"type": "json_object"})
    gateway.engine.holds = lambda count: count > 3
    chat = gateway.client(first).chat.completions
    stream = await chat.create(model="tiny", messages=[ASK], stream=True)
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    await stream.close()
    await eventually(
        lambda: [turn.finish_reason for turn in gateway.turns(first)] == ["abort"]
    )
    gateway.engine.holds = lambda _: False
    assert gateway.store.sampled_so_far(["g"]) == []

    gateway.engine.version = 5
    await say(gateway, first)
    assert gateway.store.sampled_so_far(["g", "h"]) == [sampled(0, 5, group="g")]
    gateway.engine.version = 4
    answer = await gateway.env(f"/sessions/{second.id}/children", {}, key=second.key)
    base_url = answer.json()["sessions"][0]["base_url"]
    client = openai.AsyncOpenAI(api_key="x", base_url=base_url, max_retries=0)
    await client.chat.completions.create(model="tiny", messages=[ASK])  # type: ignore[list-item]
    gateway.engine.version = 6
    await say(gateway, first, then=True)
    await say(gateway, second, then=True)
    sampled_groups = gateway.store.sampled_so_far(["g"])
    assert sampled_groups == [
        sampled(0, 5, group="g"),
        sampled(1, 4, group="g"),
    ]
    for session, expected in zip((first, second), sampled_groups, strict=True):
        summary = await gateway.finish(session)
        assert isinstance(summary, RolloutSummary)
        assert summary.oldest_version == expected.oldest_version
    assert gateway.store.sampled_so_far(["g"]) == []
