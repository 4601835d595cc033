"""The session API as an environment that we do not start uses it, over HTTP, on a fake
engine."""

from __future__ import annotations

import asyncio
import secrets
import threading
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fakes import random_reply
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from running_gateway import ASK, ENV_KEY, MORE, Running, eventually, running
from slow_upload import CHUNKED, Upload
from stepped_clock import SteppedClock
from training_samples_example import training_rows

from invrl.cli.flags import parse_flags
from invrl.gateway.registry import WorkerPlace
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.server.routes.session_bodies import (
    Opened,
    OpenedSession,
    Rewarded,
    SessionView,
)
from invrl.gateway.session_record import SessionRecord
from invrl.gateway.sessions import lifecycle
from invrl.gateway.turns.conversation import Conversation
from invrl.gateway.turns.turns import Turns
from invrl.host.processes.awake_time import AwakeClock
from invrl.run.settings.config import resolve
from invrl.store.lease_store import LeaseStore
from invrl.store.run_store_writer import RunStoreWriter
from invrl.train.batches.micro_batch import token_sequences
from invrl.train.batches.packing import pack
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, RolloutSummary
from invrl.types.sessions import Session
from invrl.types.tasks import Task


async def chat(
    gateway: Running, session: Session, *messages: Any, **options: Any
) -> Any:
    client = gateway.client(session)
    return await client.chat.completions.create(
        model="tiny", messages=messages or [ASK], **options
    )


def code(answer: httpx.Response) -> tuple[int, str]:
    """Status and code of a refusal, which has the error shape."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    return answer.status_code, error["code"]


async def post(
    gateway: Running, path: str, body: object, key: str = ENV_KEY
) -> httpx.Response:
    return await gateway.http.post(
        gateway.url + path, json=body, headers={"authorization": f"Bearer {key}"}
    )


# ----------------------------------------------------------------- keys


async def test_two_different_keys_in_a_request_are_a_conflict(gateway: Running):
    mine, other = await gateway.open(members=2)
    body = {"model": "tiny", "messages": [ASK]}
    for path, headers in (
        (f"/s/{mine.key}/v1", {"authorization": f"Bearer {other.key}"}),
        (f"/s/{mine.key}/v1", {"x-api-key": other.key}),
        ("/v1", {"authorization": f"Bearer {mine.key}", "x-api-key": other.key}),
    ):
        answer = await gateway.http.post(
            f"{gateway.url}{path}/chat/completions", json=body, headers=headers
        )
        assert code(answer) == (401, "conflicting_keys")
    both = {"authorization": f"Bearer {ENV_KEY}", "x-api-key": mine.key}
    answer = await gateway.http.get(f"{gateway.url}/sessions/{mine.id}", headers=both)
    assert code(answer) == (401, "conflicting_keys")
    for headers in ({"authorization": f"Bearer {mine.key}"}, {"x-api-key": mine.key}):
        answer = await gateway.http.post(
            f"{gateway.url}/v1/chat/completions", json=body, headers=headers
        )
        assert answer.status_code == 200
    assert gateway.turns(other) == []


async def test_a_thousand_guessed_keys_are_refused_over_http(gateway: Running):
    [session] = await gateway.open()
    keys = [
        session.key[:-1],
        session.key + "a",
        session.key[:-1] + ("a" if session.key[-1] != "a" else "b"),
    ]
    keys += ["isk-" + secrets.token_urlsafe(24) for _ in range(1000 - len(keys))]
    body = b'{"model": "tiny", "messages": []}'
    ways = [
        lambda key: (f"/s/{key}/v1/chat/completions", {}),
        lambda key: ("/v1/chat/completions", {"authorization": f"Bearer {key}"}),
        lambda key: ("/v1/chat/completions", {"x-api-key": key}),
        lambda key: (
            f"/sessions/{session.id}/reward",
            {"authorization": f"Bearer {key}"},
        ),
    ]

    async def guess(some: list[str]) -> set[tuple[int, str]]:
        seen = set()
        for at, key in enumerate(some):
            path, headers = ways[at % len(ways)](key)
            content = b'{"reward": 1}' if "reward" in path else body
            headers |= {"content-type": "application/json"}
            seen.add(
                code(
                    await gateway.http.post(
                        gateway.url + path, content=content, headers=headers
                    )
                )
            )
        return seen

    seen = await asyncio.gather(*(guess(keys[at::8]) for at in range(8)))
    assert set().union(*seen) == {(401, "invalid_api_key")}
    assert gateway.engine.requests == []
    assert (await gateway.env(f"/sessions/{session.id}")).json()["reward"] is None


async def test_session_key_works_only_for_its_own_open_session(gateway: Running):
    mine, other = await gateway.open(members=2)
    for path, body in (
        ("reward", {"reward": 1.0}),
        ("finish", {}),
        ("abort", {}),
        ("children", {}),
    ):
        answer = await post(gateway, f"/sessions/{other.id}/{path}", body, key=mine.key)
        assert code(answer) == (401, "invalid_api_key")
    await chat(gateway, mine)
    await gateway.finish(mine)
    with pytest.raises(openai.AuthenticationError) as late:
        await chat(gateway, mine)
    assert late.value.code == "session_closed"
    for path, body in (("reward", {"reward": 2.0}), ("children", {})):
        assert code(await post(gateway, f"/sessions/{mine.id}/{path}", body)) == (
            409,
            "session_closed",
        )
    state = (await gateway.env(f"/sessions/{other.id}")).json()
    assert state["state"] == "open"
    assert state["reward"] is None
    assert state["children"] == []


# ----------------------------------------------------------------- opening


async def test_repeated_session_opening_returns_the_same_sessions(gateway: Running):
    first = await gateway.open(members=3, request_id="r1")
    assert await gateway.open(members=3, request_id="r1") == first
    at_once = await asyncio.gather(
        *(gateway.open(members=2, request_id="r2") for _ in range(5))
    )
    assert all(opened == at_once[0] for opened in at_once)
    assert await gateway.open(members=3) != first
    body = {
        "task_id": "t",
        "group_id": "h",
        "members": [{"index": 0}],
        "request_id": "r1",
    }
    assert code(await post(gateway, "/sessions", body)) == (409, "request_id_reused")
    assert (await gateway.env("/metrics")).json()["sessions"] == {"open": 8}


async def test_each_exceeded_limit_has_its_own_error_code(gateway: Running):
    [session] = await gateway.open(limits={"max_turns": 2})
    first = await chat(gateway, session, max_tokens=3)
    await chat(gateway, session)
    with pytest.raises(openai.PermissionDeniedError) as over:
        await chat(gateway, session, ASK, MORE)
    assert over.value.code == "max_turns_exceeded"
    assert first.choices[0].finish_reason == "length"

    [session] = await gateway.open(limits={"max_sampled_tokens": 20})
    await chat(gateway, session)
    second = await chat(gateway, session, MORE)
    assert second.choices[0].finish_reason == "length"
    assert [len(turn.sampled_ids_T) for turn in gateway.turns(session)] == [13, 7]
    with pytest.raises(openai.PermissionDeniedError) as over:
        await chat(gateway, session, ASK, MORE)
    assert over.value.code == "max_tokens_exceeded"
    assert isinstance(await gateway.finish(session), RolloutSummary)

    held_back = True
    gateway.engine.holds = lambda _: held_back
    [session] = await gateway.open(limits={"max_concurrent_calls": 1})
    held = asyncio.create_task(chat(gateway, session))
    await eventually(lambda: gateway.engine.running)
    with pytest.raises(openai.RateLimitError) as over:
        await chat(gateway, session, MORE)
    assert over.value.code == "too_many_concurrent_calls"
    assert over.value.response.headers["retry-after"] == "1"
    held_back = False
    await held

    [session] = await gateway.open(limits={"timeout_s": 0.01})
    await eventually(
        lambda: (
            getattr(gateway.store.closed_session(session.id), "state", "") == "expired"
        )
    )
    with pytest.raises(openai.AuthenticationError) as over:
        await chat(gateway, session)
    assert over.value.code == "session_timeout"


async def test_sessions_with_stalled_clients_expire_concurrently(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
):
    """Each waits for its client until all of them do: one after the other would wait
    for ever."""
    all_wait = asyncio.Barrier(3)

    async def settle(self: Conversation, deadline_s: float) -> None:
        await all_wait.wait()

    monkeypatch.setattr(Conversation, "settle", settle)
    monkeypatch.setattr(lifecycle, "_EXPIRY_INTERVAL_S", 0.01)
    sessions = await gateway.open(members=3, limits={"timeout_s": 0.01})
    await eventually(
        lambda: all(gateway.store.closed_session(session.id) for session in sessions)
    )


async def test_a_retry_of_the_last_permitted_turn_is_answered(gateway: Running):
    [session] = await gateway.open(limits={"max_turns": 1})
    answers = [
        await chat(gateway, session, extra_headers={"x-stainless-retry-count": count})
        for count in ("0", "1")
    ]
    assert answers[0] == answers[1]


async def test_session_limits_can_only_be_lowered(
    tmp_path: Path, model: Path, renderer: Renderer
):
    async with running(
        tmp_path,
        model,
        renderer,
        session={"max_turns": 5, "max_calls": 3},
    ) as gateway:
        [session] = await gateway.open(limits={"max_turns": 4})
        assert session.limits.max_turns == 4
        assert session.limits.max_concurrent_calls == 3
        body = {
            "task_id": "t",
            "group_id": "g",
            "members": [{"index": 0}],
        }
        for limits in (
            {"max_turns": 6},
            {"timeout_s": 4000},
            {"max_concurrent_calls": 4},
        ):
            assert code(
                await post(gateway, "/sessions", body | {"limits": limits})
            ) == (
                400,
                "limit_too_high",
            )
        child = f"/sessions/{session.id}/children"
        answer = await post(
            gateway, child, {"limits": {"max_turns": 5}}, key=session.key
        )
        assert code(answer) == (400, "limit_too_high")


# ----------------------------------------------------------------- rewards


async def test_rewards_of_turns_and_trajectories_reach_the_samples(gateway: Running):
    [session] = await gateway.open()
    first = await chat(gateway, session)
    reply = first.choices[0].message.model_dump()
    await chat(gateway, session, ASK, reply, MORE)
    await chat(gateway, session, ASK, reply, {"role": "user", "content": "other"})
    shared, left, right = (turn.id for turn in gateway.turns(session))
    path = f"/sessions/{session.id}/reward"
    for body in (
        {"reward": 5.0, "branch": right},
        {"reward": 0.25, "branch": right, "components": {"style": 1.0}},
        {"reward": -1.0, "turn": shared},
        {"reward": 9.0},
    ):
        assert (await post(gateway, path, body, key=session.key)).json()[
            "state"
        ] == "open"
    assert code(await post(gateway, path, {"reward": 1.0, "turn": "turn-x"})) == (
        404,
        "turn_not_found",
    )
    both = {"reward": 1.0, "turn": shared, "branch": right}
    assert code(await post(gateway, path, both)) == (400, "invalid_request")
    shown = (await gateway.env(f"/sessions/{session.id}")).json()
    assert shown["branch_rewards"][right]["components"] == {"style": 1.0}
    summary = await gateway.finish(session, reward=2.0)
    assert isinstance(summary, RolloutSummary)
    assert summary.reward == 2.0
    assert summary.turn_rewards == {shared: -1.0}
    assert summary.branch_rewards == {right: 0.25}
    assert summary.turn_levels == {shared: "main/0", right: "main/1"}
    rows = training_rows(gateway.store.rollout(session.id))
    assert [(row.reward, row.turn_ids) for row in rows] == [
        (2.0, (shared, left)),
        (0.25, (shared, right)),
    ]


async def test_a_foreign_sessions_turn_cannot_be_rewarded(gateway: Running):
    mine, other = await gateway.open(members=2)
    await chat(gateway, other)
    body = {"reward": 1.0, "turn": gateway.turns(other)[0].id}
    assert code(await post(gateway, f"/sessions/{mine.id}/reward", body)) == (
        404,
        "turn_not_found",
    )


async def test_a_reward_may_come_after_the_finish_until_its_deadline(
    tmp_path: Path, model: Path, renderer: Renderer
):
    async with running(tmp_path, model, renderer, late={"deadline_s": 60.0}) as gateway:
        judged, empty, aborted = await gateway.open(members=3)
        await chat(gateway, judged)
        await chat(gateway, aborted)
        for _ in range(2):
            answer = await post(gateway, f"/sessions/{judged.id}/finish", {})
            assert answer.status_code == 202
            assert answer.json()["outcome"] == "unrewarded"
        with pytest.raises(openai.AuthenticationError):
            await chat(gateway, judged)
        assert gateway.store.outbox_after(0) == []
        turn = gateway.turns(judged)[0].id
        path = f"/sessions/{judged.id}/reward"
        assert (await post(gateway, path, {"reward": 3.0, "turn": turn})).json()[
            "state"
        ] == "unrewarded"
        assert (await post(gateway, path, {"reward": 0.5})).json()[
            "state"
        ] == "finished"
        assert code(await post(gateway, path, {"reward": 0.7})) == (
            409,
            "session_closed",
        )
        [(_, outcome)] = gateway.store.outbox_after(0)
        assert isinstance(outcome, RolloutSummary)
        assert outcome.reward == 0.5
        assert outcome.turn_rewards == {turn: 3.0}
        assert gateway.store.rollout(judged.id).summary == outcome
        # A reward is not what an empty or an aborted session lacks.
        assert (await post(gateway, f"/sessions/{empty.id}/finish", {})).json()[
            "reason"
        ] == "empty"
        assert (
            await post(gateway, f"/sessions/{aborted.id}/finish", {})
        ).status_code == 202
        assert (await post(gateway, f"/sessions/{aborted.id}/abort", {})).json()[
            "reason"
        ] == "aborted"


async def test_session_past_its_reward_deadline_is_dropped_with_a_reason(
    tmp_path: Path, model: Path, renderer: Renderer
):
    async with running(tmp_path, model, renderer, late={"deadline_s": 0.05}) as gateway:
        [session] = await gateway.open()
        await chat(gateway, session)
        assert (
            await post(gateway, f"/sessions/{session.id}/finish", {})
        ).status_code == 202
        await eventually(lambda: gateway.store.outbox_after(0))
        [(_, outcome)] = gateway.store.outbox_after(0)
        assert isinstance(outcome, FailedRollout)
        assert outcome.reason is FailureReason.BAD_REWARD
        assert "late.deadline_s" in outcome.detail
        late = await post(gateway, f"/sessions/{session.id}/reward", {"reward": 1.0})
        assert code(late) == (409, "reward_too_late")


@pytest.mark.parametrize("policy", ["drop", "accept"])
async def test_expired_session_ends_according_to_its_state(
    tmp_path: Path, model: Path, renderer: Renderer, policy: str
):
    clock = SteppedClock()
    options = {
        "late": {"expired": policy, "deadline_s": 600.0},
        "place": WorkerPlace(awake_time=AwakeClock(clock=clock)),
    }
    async with running(tmp_path, model, renderer, **options) as gateway:
        silent, rewarded = await gateway.open(members=2, limits={"timeout_s": 8})
        for session in (silent, rewarded):
            await chat(gateway, session)
        await post(gateway, f"/sessions/{rewarded.id}/reward", {"reward": 0.5})
        clock.step(9.0)
        await eventually(lambda: gateway.store.closed_session(rewarded.id) is not None)
        shown = (await gateway.env(f"/sessions/{silent.id}")).json()
        answer = await post(gateway, f"/sessions/{silent.id}/reward", {"reward": 0.25})
        outcomes = {
            outcome.session_id: outcome for _, outcome in gateway.store.outbox_after(0)
        }
        if policy == "drop":
            assert shown["state"] == "expired"
            assert code(answer) == (409, "reward_too_late")
            assert [
                o.reason for o in outcomes.values() if isinstance(o, FailedRollout)
            ] == ["timeout"] * 2
        else:
            assert shown["state"] == "unrewarded"
            assert answer.status_code == 200
            rewards = {
                name: o.reward
                for name, o in outcomes.items()
                if isinstance(o, RolloutSummary)
            }
            assert rewards == {silent.id: 0.25, rewarded.id: 0.5}


# ----------------------------------------------------------------- children


async def child_of(gateway: Running, parent: Session, **body: object) -> Session:
    answer = await post(
        gateway, f"/sessions/{parent.id}/children", body, key=parent.key
    )
    assert answer.status_code == 201, answer.text
    return OpenedSession(**answer.json()["sessions"][0])


async def test_children_train_with_their_parent_under_their_own_rewards(
    gateway: Running,
):
    [parent] = await gateway.open()
    default, judged, aborted = [await child_of(gateway, parent) for _ in range(3)]
    grandchild = await child_of(gateway, judged, request_id="g")
    assert (await child_of(gateway, judged, request_id="g")).key == grandchild.key
    assert default.parent_id == parent.id
    assert (
        len({session.key for session in (parent, default, judged, aborted, grandchild)})
        == 5
    )
    for session in (parent, default, judged, aborted, grandchild):
        await chat(gateway, session)
    for stranger in (default, grandchild):
        answer = await post(
            gateway, f"/sessions/{parent.id}/finish", {}, key=stranger.key
        )
        assert code(answer) == (401, "invalid_api_key")
    await post(gateway, f"/sessions/{aborted.id}/abort", {}, key=aborted.key)
    await gateway.finish(judged, reward=-1.0)
    # A judge may come after the child has finished, until its parent has.
    assert (
        await post(gateway, f"/sessions/{judged.id}/reward", {"reward": -2.0})
    ).status_code == 200
    assert gateway.store.outbox_after(0) == []
    shown = (await gateway.env(f"/sessions/{parent.id}", key=parent.key)).json()
    assert shown["children"] == [default.id, judged.id, aborted.id]
    summary = await gateway.finish(parent, reward=1.0)
    assert isinstance(summary, RolloutSummary)
    assert summary.child_rewards == {
        default.id: 1.0,
        judged.id: -2.0,
        grandchild.id: -2.0,
    }
    assert summary.child_reward_from == {
        default.id: parent.id,
        judged.id: judged.id,
        grandchild.id: judged.id,
    }
    assert summary.num_turns == 4
    assert summary.trained_tokens == 4 * 13
    assert gateway.store.closed_session(default.id).state == "finished"
    assert [outcome for _, outcome in gateway.store.outbox_after(0)] == [summary]
    rows = training_rows(gateway.store.rollout(parent.id))
    assert [(row.rollout_id, row.reward) for row in rows] == [
        (parent.id, reward) for reward in (1.0, 1.0, -2.0, -2.0)
    ]
    late = await post(gateway, f"/sessions/{judged.id}/reward", {"reward": 0.0})
    assert code(late) == (409, "session_closed")
    with pytest.raises(openai.AuthenticationError):
        await chat(gateway, default)


async def test_aborting_a_parent_aborts_its_children_and_their_number_is_bounded(
    gateway: Running,
):
    [parent] = await gateway.open()
    child = await child_of(gateway, parent)
    for _ in range(63):
        await child_of(gateway, child)
    answer = await post(gateway, f"/sessions/{parent.id}/children", {}, key=parent.key)
    assert code(answer) == (403, "too_many_children")
    await post(gateway, f"/sessions/{parent.id}/abort", {})
    assert (await gateway.env("/metrics")).json()["sessions"] == {
        "open": 0,
        "aborted": 65,
    }
    [(_, outcome)] = gateway.store.outbox_after(0)
    assert isinstance(outcome, FailedRollout)
    assert outcome.session_id == parent.id


async def test_session_that_ends_before_its_opening_is_answered_leaves_nothing(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
):
    """Whoever reads the store (the driver, for a group that was dropped) sees a session
    before the gateway's event loop has heard of the commit, and may abort it."""
    opened = Future[None]()
    commit = RunStoreWriter.open_sessions
    add = Turns.open
    all_turns: list[Turns] = []

    def held(writer: RunStoreWriter, *parts: Any, **options: Any) -> Future[None]:
        commit(writer, *parts, **options).result(60)
        return opened

    def seen(turns: Turns, record: SessionRecord) -> None:
        all_turns.append(turns)
        add(turns, record)

    monkeypatch.setattr(RunStoreWriter, "open_sessions", held)
    monkeypatch.setattr(Turns, "open", seen)
    opening = asyncio.create_task(gateway.open())
    await eventually(lambda: len(gateway.store.open_sessions("g")) == 1)
    [stored] = gateway.store.open_sessions("g")
    await post(gateway, f"/sessions/{stored.id}/abort", {})
    opened.set_result(None)
    [session] = await opening
    assert session.id == stored.id
    assert (await gateway.env("/metrics")).json()["sessions"] == {
        "open": 0,
        "aborted": 1,
    }
    with pytest.raises(openai.AuthenticationError):
        await chat(gateway, session)
    assert not all_turns[0]._conversations, "a conversation that nothing ends"


# ------------------------------------------------------------ freeze, snapshot, build


async def test_call_in_flight_does_not_change_a_finished_rollout(gateway: Running):
    [session] = await gateway.open()
    await chat(gateway, session)
    gateway.engine.holds = lambda count: count > 5
    calls = [
        asyncio.create_task(chat(gateway, session, MORE, stream=stream))
        for stream in (False, False)
    ]
    await eventually(lambda: gateway.engine.running)
    summary, reward = await asyncio.gather(
        gateway.finish(session, reward=0.5),
        post(gateway, f"/sessions/{session.id}/reward", {"reward": 0.9}),
    )
    assert isinstance(summary, RolloutSummary)
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, openai.AuthenticationError) for result in ended)
    assert summary.reward == 0.5 or reward.status_code == 200
    rollout = gateway.store.rollout(session.id)
    assert rollout.summary == summary
    assert (
        sum(int(row.loss_mask_T.sum()) for row in training_rows(rollout))
        == summary.trained_tokens
    )
    assert (
        await post(gateway, f"/sessions/{session.id}/finish", {"reward": 7.0})
    ).json()["reward"] == summary.reward


async def test_session_whose_finish_has_begun_refuses_requests(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
):
    begun = asyncio.Event()
    go_on = asyncio.Event()
    settle = Conversation.settle

    async def held(conversation: Conversation, deadline_s: float) -> None:
        await settle(conversation, deadline_s)
        begun.set()
        await go_on.wait()

    monkeypatch.setattr(Conversation, "settle", held)
    [session] = await gateway.open()
    await chat(gateway, session)
    finishing = asyncio.create_task(gateway.finish(session, reward=0.5))
    await asyncio.wait_for(begun.wait(), 60)
    for path in ("reward", "children"):
        body = {"reward": 0.9} if path == "reward" else {}
        answer = await post(gateway, f"/sessions/{session.id}/{path}", body)
        assert code(answer) == (409, "session_closed")
    with pytest.raises(openai.AuthenticationError):
        await chat(gateway, session, MORE)
    again = asyncio.create_task(gateway.finish(session, reward=0.7))
    go_on.set()
    summary = await finishing
    assert isinstance(summary, RolloutSummary)
    assert summary.reward == 0.5
    assert summary.num_turns == 1
    assert await again == summary


async def test_delivery_after_the_finish_does_not_count(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
):
    """The answer's last byte has left, and the finish gets in before it is counted: a
    settle that does not wait stands for a client that takes longer than the settle's
    deadline."""
    held = asyncio.Event()
    went_on = Turns.deliver

    async def settle(conversation: Any, deadline_s: float) -> None:
        conversation.closing = True

    monkeypatch.setattr("invrl.gateway.turns.conversation.Conversation.settle", settle)
    late: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        Turns, "deliver", lambda *given: (late.append(given), held.set())
    )
    [session] = await gateway.open()
    await chat(gateway, session)
    await asyncio.wait_for(held.wait(), 60)
    monkeypatch.setattr(Turns, "deliver", went_on)
    await chat(gateway, session, MORE)
    summary = await gateway.finish(session, reward=1.0)
    went_on(*late[0])
    assert isinstance(summary, RolloutSummary)
    assert summary.sampled_tokens == 26
    assert summary.delivered_tokens == 13
    assert summary.trained_tokens == 13
    await gateway.open()  # its commit comes after whatever the late delivery wrote
    rows = training_rows(gateway.store.rollout(session.id))
    assert sum(int(row.loss_mask_T.sum()) for row in rows) == 13
    measured = (await gateway.env("/metrics")).json()
    assert measured["delivered_fraction"] == 0.5
    assert measured["trained_fraction"] == 0.5
    assert measured["turns"]["delivered_too_late"] == 1


@pytest.mark.parametrize("train", [True, False])
async def test_setting_decides_whether_auxiliary_roots_are_trained(
    tmp_path: Path, model: Path, renderer: Renderer, train: bool
):
    async with running(
        tmp_path, model, renderer, session={"train_auxiliary_roots": train}
    ) as gateway:
        gateway.engine.script = random_reply(tokens=5)
        [session] = await gateway.open()
        await chat(gateway, session, {"role": "user", "content": "A title, please."})
        first = await chat(gateway, session)
        await chat(gateway, session, ASK, first.choices[0].message.model_dump(), MORE)
        title, *main = (turn.id for turn in gateway.turns(session))
        shown = (await gateway.env(f"/sessions/{session.id}")).json()
        assert shown["auxiliary_roots"] == [title]
        summary = await gateway.finish(session)
        assert isinstance(summary, RolloutSummary)
        assert summary.auxiliary_tokens == 6
        assert summary.trained_tokens == (18 if train else 12)
        rows = training_rows(gateway.store.rollout(session.id))
        assert [row.turn_ids for row in rows] == ([(title,)] if train else []) + [
            tuple(main)
        ]


async def test_a_session_of_an_evaluation_is_not_handed_over(
    tmp_path: Path, model: Path, renderer: Renderer
):
    async with running(tmp_path, model, renderer) as gateway:
        [evaluated] = await gateway.open(purpose="eval")
        [trained] = await gateway.open()
        for session in (evaluated, trained):
            await chat(gateway, session)
            await gateway.finish(session)
        handed_over = [
            outcome.session_id for _, outcome in gateway.store.outbox_after(0)
        ]
        assert handed_over == [trained.id]


# ----------------------------------------------------------------- leases


async def test_an_environment_leases_a_task_and_opens_its_sessions_once(
    tmp_path: Path, model: Path, renderer: Renderer
):
    async with running(
        tmp_path, model, renderer, leases=True, session={"max_open": 3}
    ) as gateway:
        store = LeaseStore(tmp_path / "run.db")
        task = Task(id="t7", payload={"question": "6*7?"}, label="42", split="train")
        members = (
            GroupMember(index=0, attempt=0),
            GroupMember(index=1, attempt=2),
        )
        assert (await post(gateway, "/tasks/lease", {})).json() == {
            "lease": None,
            "ended": False,
        }
        waiting = asyncio.create_task(post(gateway, "/tasks/lease", {"wait_s": 20}))
        await asyncio.sleep(0.05)
        opening = {
            "task_id": "t7",
            "group_id": "g3",
            "members": [{"index": 1, "attempt": 2}, {"index": 0}],
        }
        store.offer(GroupLease(group_id="g3", task=task, members=members))
        leased = await waiting
        assert leased.status_code == 200, leased.text
        lease = leased.json()["lease"]
        assert lease == {
            "group_id": "g3",
            "task": {
                "id": "t7",
                "payload": {"question": "6*7?"},
                "label": "42",
                "split": "train",
            },
            "members": [
                {"index": 0, "attempt": 0},
                {"index": 1, "attempt": 2},
            ],
            "model": "tiny",
            "lease_timeout_s": 60.0,
        }
        for wrong in (
            {"group_id": "g4"},
            {"members": [{"index": 2}]},
            {"task_id": "t8"},
        ):
            assert code(await post(gateway, "/sessions", opening | wrong)) == (
                409,
                "not_leased",
            )
        assert (await gateway.env("/metrics")).json()["sessions"] == {"open": 0}
        assert (await post(gateway, "/sessions", opening)).status_code == 201
        assert code(
            await post(gateway, "/sessions", opening | {"members": [{"index": 0}]})
        ) == (
            409,
            "not_leased",
        )
        assert store.taken() == []
        evaluation = opening | {"purpose": "eval", "members": [{"index": 0}]}
        assert (await post(gateway, "/sessions", evaluation)).status_code == 201
        # A refusal for lack of room leaves the lease as it is.
        store.offer(GroupLease(group_id="g4", task=task, members=members))
        assert (await post(gateway, "/tasks/lease", {})).json()["lease"][
            "group_id"
        ] == "g4"
        full = await post(gateway, "/sessions", opening | {"group_id": "g4"})
        assert code(full) == (429, "too_many_sessions")
        assert [place.group_id for place in store.taken()] == ["g4", "g4"]
        store.close()


async def test_leasing_needs_the_environment_key_and_a_run_with_leases(
    gateway: Running,
):
    [session] = await gateway.open()
    assert code(await post(gateway, "/tasks/lease", {}, key=session.key)) == (
        401,
        "invalid_api_key",
    )
    assert code(await post(gateway, "/tasks/lease", {})) == (409, "no_leases")


def lease_of(group_id: str) -> GroupLease:
    task = Task(id="t7", payload={"question": "6*7?"}, label="42", split="train")
    return GroupLease(
        group_id=group_id, task=task, members=(GroupMember(index=0, attempt=0),)
    )


async def test_session_opening_returns_the_model_name(gateway: Running):
    """Sessions, children and a retry's answer all carry what a client needs."""
    opening = {
        "task_id": "t",
        "group_id": "g",
        "members": [{"index": 0}],
        "request_id": "r",
    }
    [session] = (await post(gateway, "/sessions", opening)).json()["sessions"]
    assert (await post(gateway, "/sessions", opening)).json()["sessions"] == [session]
    own = f"/sessions/{session['id']}"
    [child] = (await post(gateway, own + "/children", {}, key=session["key"])).json()[
        "sessions"
    ]
    assert child["parent_id"] == session["id"]
    for opened in (session, child):
        client = openai.AsyncOpenAI(
            base_url=opened["base_url"], api_key=opened["key"], max_retries=0
        )
        assert opened["model"] in [model.id async for model in client.models.list()]
        answer = await client.chat.completions.create(
            model=opened["model"], messages=[ASK]
        )
        assert answer.model == opened["model"]
    assert (await gateway.env(own)).json()["model"] == session["model"] == "tiny"


async def test_lease_request_after_the_end_of_a_run_is_answered_with_the_end(
    tmp_path: Path, model: Path, renderer: Renderer
):
    """To who waits for a task, who asks later, and who is in the middle of a
    rollout."""
    over = threading.Event()
    async with running(
        tmp_path, model, renderer, leases=True, run_ended=over.is_set
    ) as gateway:
        store = LeaseStore(tmp_path / "run.db")
        store.offer(lease_of("g1"))
        assert (await post(gateway, "/tasks/lease", {})).json()["lease"][
            "group_id"
        ] == "g1"
        [session] = await gateway.open(task_id="t7", group_id="g1")
        [evaluated] = await gateway.open(task_id="t8", group_id="e1", purpose="eval")
        child = await child_of(gateway, session)
        await chat(gateway, session)
        waiting = asyncio.create_task(post(gateway, "/tasks/lease", {"wait_s": 60}))
        store.offer(lease_of("g2"))
        assert (await waiting).json()["lease"]["group_id"] == "g2"
        waiting = asyncio.create_task(post(gateway, "/tasks/lease", {"wait_s": 60}))
        over.set()
        assert (await waiting).json() == {"lease": None, "ended": True}
        store.offer(lease_of("g3"))
        assert (await post(gateway, "/tasks/lease", {"wait_s": 60})).json() == {
            "lease": None,
            "ended": True,
        }
        late = {
            "task_id": "t7",
            "group_id": "g2",
            "members": [{"index": 0}],
        }
        assert code(await post(gateway, "/sessions", late)) == (410, "run_ended")

        async def ended() -> bool:
            return (await gateway.env(f"/sessions/{session.id}")).json()[
                "state"
            ] == "aborted"

        async with asyncio.timeout(60):
            while not await ended():
                await asyncio.sleep(0.01)
        for open_session in (session, child):
            with pytest.raises(openai.APIStatusError) as refused:
                await chat(gateway, open_session)
            assert code(refused.value.response) == (410, "run_ended")
        own = f"/sessions/{session.id}"
        assert code(await post(gateway, own + "/reward", {"reward": 1.0})) == (
            410,
            "run_ended",
        )
        outcome = await gateway.finish(session)
        assert isinstance(outcome, FailedRollout)
        assert outcome.reason is FailureReason.RUN_ENDED
        await chat(gateway, evaluated)
        assert isinstance(await gateway.finish(evaluated), RolloutSummary), (
            "evaluations go on"
        )
        store.close()


async def test_environment_of_the_readme_ends_with_the_run(
    tmp_path: Path, model: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
):
    """Its program as it stands, with an agent that is well once, then raises, then
    meets the end."""
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    over = threading.Event()
    seen: list[str] = []
    async with running(
        tmp_path, model, renderer, leases=True, run_ended=over.is_set
    ) as gateway:
        store = LeaseStore(tmp_path / "run.db")
        for number in range(3):
            store.offer(lease_of(f"g{number}"))

        def my_agent(
            base_url: str, key: str, model_name: str, payload: dict[str, str]
        ) -> float:
            seen.append(payload["question"])
            client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
            client.chat.completions.create(model=model_name, messages=[ASK])
            if len(seen) == 2:
                raise ValueError("a bug")
            if len(seen) == 3:
                over.set()
                while True:  # until it is refused
                    client.chat.completions.create(model=model_name, messages=[ASK])
            return 1.0

        monkeypatch.setenv("INVRL_ENV_KEY", ENV_KEY)
        assert "http://127.0.0.1:8000" in program
        compiled = compile(
            program.replace("http://127.0.0.1:8000", gateway.url),
            "environments.md",
            "exec",
        )
        await asyncio.to_thread(exec, compiled, {"my_agent": my_agent})
        outcomes = [outcome for _, outcome in gateway.store.outbox_after(0)]
        store.close()
    assert seen == ["6*7?"] * 3
    good, bad, late = outcomes
    assert isinstance(good, RolloutSummary)
    assert isinstance(bad, FailedRollout)
    assert isinstance(late, FailedRollout)
    assert good.reward == 1.0
    assert bad.reason == FailureReason.ABORTED
    assert late.reason == FailureReason.RUN_ENDED
    assert "a bug" in bad.detail


# ----------------------------------------------------------------- bad input


async def test_bad_bodies_have_the_error_shape_and_no_5xx(gateway: Running):
    [session] = await gateway.open()
    reward = f"/sessions/{session.id}/reward"
    opening = '{"task_id": "t", "group_id": "g", "members": [{"index": 0}], %s}'
    bodies = [
        (reward, f'{{"reward": {value}}}')
        for value in ("NaN", "Infinity", "-Infinity", "1e999", '"1"')
    ]
    bodies += [
        (reward, f'{{"reward": {value}}}')
        for value in ("true", "null", "[]", "9" * 400, "9" * 9000)
    ]
    bodies += [
        (reward, text)
        for text in ("", "{", "[" * 100_000, '{"a":' * 100_000, "null", "1", '"x"')
    ]
    bodies += [
        (reward, '{"reward": 1, "components": {"a": NaN}}'),
        (reward, '{"reward": 1, "\\ud800": 1}'),
    ]
    bodies += [
        (reward, '{"reward": 1, "turn": "\\ud800"}'),
        (reward, '{"reward": 1, "turn": ["x"]}'),
    ]
    bodies += [
        ("/sessions", opening % extra)
        for extra in ('"limits": {"max_turns": 0}', '"request_id": 1')
    ]
    bodies += [
        ("/sessions", opening % '"limits": {"timeout_s": NaN}'),
        ("/tasks/lease", '{"wait_s": -1}'),
    ]
    bodies += [("/sessions", opening % '"sampling": {"max_new_tokens": 1e30}')]
    bodies += [
        (
            "/sessions",
            '{"task_id": "\\ud800", "group_id": "g", "members": [{"index": 0}]}',
        )
    ]
    raw = [(path, body.encode()) for path, body in bodies] + [
        (reward, b'{"reward": 1, "x": "\xff"}')
    ]
    for path, body in raw:
        headers = {
            "authorization": f"Bearer {ENV_KEY}",
            "content-type": "application/json",
        }
        answer = await gateway.http.post(
            gateway.url + path, content=body, headers=headers
        )
        assert code(answer)[0] in (400, 404), (body[:80], answer.text)
    assert (await gateway.env(f"/sessions/{session.id}")).json()["reward"] is None


async def test_session_bodies_have_a_size_and_a_deadline(
    tmp_path: Path, model: Path, renderer: Renderer
):
    key = f"authorization: Bearer {ENV_KEY}"
    async with running(tmp_path, model, renderer, max_body_bytes=1000) as gateway:
        answer = await gateway.http.post(
            gateway.url + "/sessions",
            content=b" " * 1001,
            headers=dict([key.split(": ")]),
        )
        assert code(answer) == (413, "request_too_large")
    async with running(tmp_path, model, renderer, body_timeout_s=0.2) as gateway:
        upload = Upload()
        await upload.send(gateway.url, "/sessions", f"{key}\r\n{CHUNKED}", pieces=0)
        assert code(upload.answer()) == (408, "timeout")


async def test_openapi_lists_the_session_routes_with_types_and_refusals(
    gateway: Running,
):
    schema = (await gateway.env("/openapi.json")).json()
    routes = {
        (verb, path)
        for path, verbs in schema["paths"].items()
        for verb in verbs
        if path != "/health"
    }
    session_path = "/sessions/{session_id}"
    assert routes == {
        ("post", f"{session_path}/{verb}")
        for verb in ("reward", "numbers", "finish", "abort", "children", "heartbeat")
    } | {
        ("post", "/tasks/lease"),
        ("post", "/sessions"),
        ("get", session_path),
        ("get", "/metrics"),
    }
    for verb, path in routes:
        operation = schema["paths"][path][verb]
        good = "201" if path in ("/sessions", f"{session_path}/children") else "200"
        assert set(operation["responses"]) - {"202"} == {good, "4XX"}
        assert operation["responses"][good]["content"]["application/json"]["schema"]
        assert operation["security"]


async def test_the_schema_needs_the_environment_key(gateway: Running):
    [session] = await gateway.open()
    assert (await gateway.http.get(gateway.url + "/openapi.json")).status_code == 401
    assert (await gateway.env("/openapi.json", key=session.key)).status_code == 401


async def test_session_api_replies_have_their_openapi_types(gateway: Running):
    good, bad = await gateway.open(members=2)
    await chat(gateway, good)
    turn = gateway.turns(good)[0].id
    body = {
        "reward": 1.0,
        "turn": turn,
        "components": {"a": 1.0},
    }
    Rewarded.model_validate(
        (await post(gateway, f"/sessions/{good.id}/reward", body)).json()
    )
    Opened.model_validate(
        (await post(gateway, f"/sessions/{good.id}/children", {})).json()
    )
    for at in range(2):
        shown = (await gateway.env(f"/sessions/{good.id}")).json()
        view = TypeAdapter(SessionView).validate_python(shown)
        assert set(shown) == {field.name for field in fields(SessionView)}
        assert good.key not in str(shown)
        assert [line.id for line in view.turns] == [turn][at:]
        assert view.turn_rewards[turn].components == {"a": 1.0}
        ended = (
            await post(gateway, f"/sessions/{good.id}/finish", {"reward": 1.0})
        ).json()
        assert TypeAdapter(RolloutSummary).validate_python(ended).outcome == "finished"
    failed = (
        await post(
            gateway, f"/sessions/{bad.id}/abort", {"reason": "timeout", "detail": "x"}
        )
    ).json()
    assert TypeAdapter(FailedRollout).validate_python(failed).outcome == "failed"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)
NUMBERS = ("numbers", "turn_numbers", "token_numbers")
FIELDS = (
    "reward",
    "turn",
    "branch",
    "components",
    "limits",
    "members",
    "task_id",
    "group_id",
    "request_id",
)


async def test_fuzzed_bodies_never_cause_a_500(gateway: Running):
    sessions = await gateway.open(members=2)
    loop = asyncio.get_running_loop()
    verbs = ("reward", "numbers", "finish", "abort", "children")
    paths = [f"/sessions/{sessions[0].id}/{verb}" for verb in verbs] + [
        "/sessions",
        "/tasks/lease",
    ]
    seen: set[int] = set()

    @settings(
        max_examples=150,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.sampled_from(paths),
        st.dictionaries(st.sampled_from(FIELDS + NUMBERS), json_values, max_size=4),
    )
    def fuzz(path: str, body: dict[str, Any]) -> None:
        import json

        answer = asyncio.run_coroutine_threadsafe(
            gateway.http.post(
                gateway.url + path,
                content=json.dumps(body).encode(),
                headers={
                    "authorization": f"Bearer {ENV_KEY}",
                    "content-type": "application/json",
                },
            ),
            loop,
        ).result(120)
        seen.add(answer.status_code)
        if answer.status_code >= 300:
            assert code(answer)[0] < 500, (path, body)

    await asyncio.to_thread(fuzz)
    assert 400 in seen


async def test_tokens_are_trained_under_the_temperature_of_the_run(
    tmp_path: Path, model: Path, renderer: Renderer
) -> None:
    """From the setting to the engine, the record, the row and the division of the
    logits."""
    config = resolve(*parse_flags(["--temperature", "0.7"]))
    fields = config.rollout.model_dump(include={"temperature"})
    async with running(tmp_path, model, renderer, **fields) as gateway:
        [session] = await gateway.open()
        reply = (await chat(gateway, session)).choices[0].message
        await chat(gateway, session, ASK, reply.model_dump(exclude_none=True), MORE)
        asked = [
            request["sampling_params"]["temperature"]
            for request in gateway.engine.requests
        ]
        assert asked == [pytest.approx(0.7)] * 2
        await gateway.finish(session, reward=1.0)
        rows = training_rows(gateway.store.rollout(session.id))
        assert [row.temperature for row in rows] == [pytest.approx(0.7)]
        (micro_batch,) = pack(
            token_sequences(rows), max_tokens=4096, share_prefixes=True
        )
        assert len(micro_batch.targets_N) == int(rows[0].loss_mask_T.sum()) > 0
        assert micro_batch.temperature_U.tolist() == [pytest.approx(0.7)] * len(
            micro_batch.project_U
        )
