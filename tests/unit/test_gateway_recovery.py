"""A gateway that starts again goes on from the run's store: exact ids, recorded
answers, old outcomes."""

from __future__ import annotations

import asyncio
import sqlite3

import openai
import pytest
from gateway_restarts import Life, ask
from running_gateway import ASK, MORE, Running, eventually

from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.server.routes.session_bodies import OpenedSession
from invrl.host.processes.process import RestartLimit
from invrl.store.lease_store import LeaseStore
from invrl.store.run_store_writer import abandon_open_sessions
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, RolloutSummary
from invrl.types.sessions import Session
from invrl.types.tasks import Task


def reply(answer) -> dict:
    return {"role": "assistant", "content": answer.choices[0].message.content}


async def test_session_continues_its_exact_ids_after_a_restart(
    life: Life, renderer: Renderer
):
    async with life.again() as gateway:
        [session] = await gateway.open()
        first = await ask(gateway, session, [ASK])
        second = await ask(gateway, session, [ASK, reply(first), MORE], max_tokens=3)
        await gateway.env(
            f"/sessions/{session.id}/reward", {"reward": 0.25, "components": {"a": 1.0}}
        )
        before = gateway.turns(session)
    async with life.again() as gateway:
        messages = [ASK, reply(first), MORE, reply(second), MORE]
        await ask(gateway, session, messages)
        tail = f"<|im_end|>\n<|im_start|>user\n{MORE['content']}<|im_end|>\n<|im_start|>assistant\n"
        path = [
            ids for turn in before for ids in (turn.context_ids_T, turn.sampled_ids_T)
        ]
        expected = [
            int(token) for ids in path for token in ids
        ] + renderer._tokenizer.encode(tail)
        assert gateway.engine.requests[0]["input_ids"] == expected
        shown = (await gateway.env(f"/sessions/{session.id}")).json()
        assert shown["state"] == "open"
        assert shown["reward"] == 0.25
        assert len(shown["turns"]) == 3
        answer = await gateway.env(
            f"/sessions/{session.id}/finish", {}, key=session.key
        )
        outcome = answer.json()
        assert outcome["num_turns"] == 3
        assert outcome["forks"] == 0
        assert outcome["reward"] == 0.25
        assert outcome["trained_tokens"] == outcome["sampled_tokens"]
    async with life.again() as gateway:
        assert (
            await gateway.env(f"/sessions/{session.id}/finish", {}, key=session.key)
        ).json() == outcome
        refused = await gateway.env("/v1/chat/completions", {}, key=session.key)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "session_closed"
        assert (await gateway.env("/sessions/ses-00no/finish", {})).status_code == 404
        assert [o.session_id for _, o in gateway.store.outbox_after(0)] == [session.id]


async def test_retry_after_a_restart_gets_the_recorded_turn(
    life: Life, renderer: Renderer
):
    stop = renderer._tokenizer.encode("abc STOP")
    asked = {
        "stop": "STOP",
        "logprobs": True,
        "max_tokens": len(stop),
    }
    async with life.again() as gateway:
        gateway.engine.script = lambda _: stop
        [session] = await gateway.open(purpose="serve")
        first = await ask(gateway, session, [ASK], **asked)
    async with life.again() as gateway:
        answer = await ask(gateway, session, [ASK], retry=True, **asked)
        assert gateway.engine.requests == []
        assert answer.model_dump() == first.model_dump()
        again = await ask(gateway, session, [ASK], retry=False, **asked)
        assert again.id != first.id  # delivered, and asked on purpose


async def test_streamed_reply_is_replayed_as_a_stream_after_a_restart(life: Life):
    async def events(gateway: Running, retry: bool) -> tuple[str, str, list[float]]:
        stream = await ask(
            gateway, session, [ASK], retry=retry, stream=True, logprobs=True
        )
        streamed_events = [event async for event in stream]
        text = "".join(
            event.choices[0].delta.content or "" for event in streamed_events
        )
        logprobs = [
            t.logprob
            for e in streamed_events
            if e.choices[0].logprobs
            for t in e.choices[0].logprobs.content
        ]
        return streamed_events[0].id, text, logprobs

    async with life.again() as gateway:
        [session] = await gateway.open()
        first = await events(gateway, retry=False)
    async with life.again() as gateway:
        assert await events(gateway, retry=True) == first
        assert gateway.engine.requests == []


async def test_aborted_turn_is_neither_continued_nor_replayed_after_a_restart(
    life: Life,
):
    async with life.again() as gateway:
        gateway.engine.holds = lambda count: count > 5
        [session] = await gateway.open()
        call = asyncio.create_task(ask(gateway, session, [ASK], stream=True))
        async for _ in await call:
            break
        await call.result().close()
        await eventually(
            lambda: [t.finish_reason for t in gateway.turns(session)] == ["abort"]
        )
    async with life.again() as gateway:
        answer = await ask(gateway, session, [ASK], retry=True, stream=True)
        assert [event async for event in answer]
        aborted, whole = gateway.turns(session)
        assert whole.id != aborted.id
        summary = await gateway.finish(session)
        assert isinstance(summary, RolloutSummary)
        assert summary.num_turns == 2
        assert summary.trained_tokens == len(whole.sampled_ids_T)


@pytest.mark.parametrize("restarts", [False, True])
async def test_reply_of_a_cancelled_turn_that_the_agent_keeps_is_named(
    life: Life, renderer: Renderer, *, restarts: bool
):
    text = ""
    async with life.again() as gateway:
        said = renderer.encode("The answer is four, as far as I can tell.")
        gateway.engine.script = lambda _: [*said, 2]
        gateway.engine.holds = lambda count: count > 5
        [session] = await gateway.open()
        call = asyncio.create_task(ask(gateway, session, [ASK], stream=True))
        async for event in await call:
            text += event.choices[0].delta.content or ""
            if text.strip():
                break
        await call.result().close()
        await eventually(
            lambda: [t.finish_reason for t in gateway.turns(session)] == ["abort"]
        )
        gateway.engine.holds = lambda count: False
        kept = [ASK, {"role": "assistant", "content": text}, MORE]
        if not restarts:
            await ask(gateway, session, kept)
    async with life.again() as gateway:
        if restarts:
            await ask(gateway, session, kept)
        shown = (await gateway.env(f"/sessions/{session.id}")).json()["turns"][1]
        assert (shown["fork_reason"], shown["parent_id"]) == ("interrupted_reply", None)
        assert shown["changed"]["sent"].startswith(text.strip())


async def test_reply_out_of_tokens_that_the_agent_keeps_is_named(
    life: Life, renderer: Renderer
):
    async with life.again() as gateway:
        said = renderer.encode("The answer is four, as far as I can tell.")
        gateway.engine.script = lambda _: [*said, 2]
        [session] = await gateway.open()
        first = await ask(gateway, session, [ASK], max_tokens=3)
        await ask(gateway, session, [ASK, reply(first), MORE])
        shown = (await gateway.env(f"/sessions/{session.id}")).json()["turns"]
        assert shown[1]["keeps_interrupted_reply"] == shown[0]["id"]
        assert shown[1]["fork_reason"] == ""
        assert "keeps_interrupted_reply" not in shown[0]


async def test_undelivered_turn_is_replayed_to_the_next_request_and_keeps_its_seed_count(
    life: Life,
):
    async with life.again() as gateway:
        [session] = await gateway.open(purpose="serve")
        first = await ask(gateway, session, [ASK])
        await ask(gateway, session, [MORE])
        seeds = [
            request["sampling_params"]["sampling_seed"]
            for request in gateway.engine.requests
        ]
        await eventually(lambda: all(turn.delivered for turn in gateway.turns(session)))
    gateway.store._db.execute("PRAGMA query_only=0")
    gateway.store._db.execute("UPDATE turns SET delivered=0 WHERE seq=1")
    async with life.again() as gateway:
        assert (await ask(gateway, session, [ASK], retry=False)).id == first.id
        await eventually(lambda: gateway.turns(session)[0].delivered)
        assert (await ask(gateway, session, [ASK], retry=False)).id != first.id
        later = gateway.engine.requests[0]["sampling_params"]["sampling_seed"]
        assert later not in seeds


async def test_stop_string_behind_a_reply_is_known_after_a_restart(
    life: Life, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
):
    """Agents append it, because the API leaves it out. A text with another ending is
    still an edit."""

    def stopped(*_: object):
        return renderer.encode("4 STOP"), {"type": "stop", "matched": "STOP"}

    async with life.again() as gateway:
        monkeypatch.setattr(gateway.engine, "_reply", stopped)
        [session] = await gateway.open()
        first = await ask(gateway, session, [ASK], stop=["x", "STOP"])
        text = first.choices[0].message.content
        assert text == "4 "
    async with life.again() as gateway:
        with_stop = {"role": "assistant", "content": text + "STOP"}
        await ask(gateway, session, [ASK, with_stop, MORE])
        edited = {"role": "assistant", "content": text + "x"}
        await ask(gateway, session, [ASK, edited, MORE])
        asked, continued, forked = gateway.turns(session)
        assert (continued.parent_id, continued.fork_reason) == (asked.id, "")
        assert forked.fork_reason == "history_edited"


async def test_reply_that_a_client_continues_counts_as_delivered(life: Life):
    async with life.again() as gateway:
        [session] = await gateway.open()
        first = await ask(gateway, session, [ASK])
        await eventually(lambda: gateway.turns(session)[0].delivered)
    gateway.store._db.execute("PRAGMA query_only=0")
    gateway.store._db.execute("UPDATE turns SET delivered=0")
    async with life.again() as gateway:
        await ask(gateway, session, [ASK, reply(first), MORE])
        await eventually(
            lambda: [turn.delivered for turn in gateway.turns(session)] == [True, True]
        )


async def test_sessions_from_before_a_restart_expire_and_count_towards_the_limit(
    life: Life,
):
    async with life.again(session={"max_open": 2}) as gateway:
        sessions = await gateway.open(members=2)
    async with life.again(session={"max_open": 2}) as gateway:
        body = {
            "task_id": "t",
            "group_id": "g",
            "members": [{"index": 0}],
        }
        assert (await gateway.env("/sessions", body)).status_code == 429
    async with life.again(
        session={"max_open": 2, "ttl_s": 0.5},
    ) as gateway:
        await eventually(lambda: len(gateway.store.outbox_after(0)) == 2)
        for session, (_, outcome) in zip(
            sessions, gateway.store.outbox_after(0), strict=True
        ):
            assert isinstance(outcome, FailedRollout)
            assert outcome.session_id == session.id
            assert outcome.reason == FailureReason.TIMEOUT
            assert gateway.store.closed_session(session.id).state == "expired"


async def test_repeated_session_opening_returns_the_same_sessions_after_a_restart(
    life: Life,
):
    async with life.again() as gateway:
        before = await gateway.open(members=2, request_id="one")
    async with life.again() as gateway:
        after = await gateway.open(members=2, request_id="one")
        assert [(s.id, s.key) for s in after] == [(s.id, s.key) for s in before]
        assert (await ask(gateway, after[0], [ASK])).id


def test_gateway_restarts_per_minute_are_limited():
    now = 0.0
    limit = RestartLimit(2, clock=lambda: now)
    assert [limit.allows() for _ in range(3)] == [True, True, False]
    now = 61.0
    assert limit.allows()


async def test_child_sessions_keep_their_limits_and_rewards_after_a_restart(life: Life):
    async def child_of(gateway: Running, parent: Session, name: str) -> Session:
        body = {"request_id": name, "limits": {"max_turns": 1}}
        answer = await gateway.env(
            f"/sessions/{parent.id}/children", body, key=parent.key
        )
        return OpenedSession(**answer.json()["sessions"][0])

    async def refused(gateway: Running, session: Session) -> str:
        with pytest.raises(openai.PermissionDeniedError) as error:
            await ask(gateway, session, [MORE])
        return error.value.code

    async with life.again() as gateway:
        [parent] = await gateway.open(limits={"max_turns": 2})
        for messages in ([ASK], [MORE]):
            await ask(gateway, parent, messages)
        child, done, gone = [
            await child_of(gateway, parent, name) for name in ("a", "b", "c")
        ]
        grandchild = await child_of(gateway, done, "a")
        for session in (child, done, gone, grandchild):
            await ask(gateway, session, [ASK])
        first, second = [turn.id for turn in gateway.turns(parent)]
        own = {
            "reward": 3.0,
            "turn": first,
            "components": {"x": 1.0},
        }
        for body in (own, {"reward": -2.0, "branch": second}):
            await gateway.env(f"/sessions/{parent.id}/reward", body, key=parent.key)
        await gateway.finish(done, reward=5.0)
        await gateway.env(f"/sessions/{gone.id}/abort", {}, key=gone.key)
        shown = (await gateway.env(f"/sessions/{parent.id}")).json()
    async with life.again() as gateway:
        assert (await gateway.env(f"/sessions/{parent.id}")).json() == shown
        counts = (await gateway.env("/metrics")).json()["sessions"]
        assert counts == {"open": 2}
        assert (
            await refused(gateway, parent)
            == await refused(gateway, child)
            == "max_turns_exceeded"
        )
        await ask(gateway, child, [ASK], retry=True)
        assert gateway.engine.requests == []
        assert (await child_of(gateway, parent, "a")).key == child.key
        late = await child_of(gateway, parent, "d")
        assert late.id[:6] == parent.id[:6]
        await ask(gateway, late, [ASK])
        await gateway.env(f"/sessions/{done.id}/reward", {"reward": 6.0}, key=done.key)
        summary = await gateway.finish(parent, reward=1.0)
        assert isinstance(summary, RolloutSummary)
        assert summary.turn_rewards == {first: 3.0}
        assert summary.branch_rewards == {second: -2.0}
        assert summary.child_rewards == {
            child.id: 1.0,
            done.id: 6.0,
            grandchild.id: 6.0,
            late.id: 1.0,
        }
        assert summary.num_turns == 6
        assert summary.trained_tokens == summary.sampled_tokens
        trained = {
            t.id
            for path in gateway.store.rollout(parent.id).trajectories
            for t in path.turns
        }
        assert len(trained) == 6
    async with life.again() as gateway:
        assert gateway.store.live_sessions() == []
        answer = await gateway.env(
            f"/sessions/{done.id}/reward", {"reward": 0.0}, key=done.key
        )
        assert answer.status_code == 409
        assert answer.json()["error"]["code"] == "session_closed"


async def test_sampled_tokens_count_towards_the_limit_across_a_restart(life: Life):
    async with life.again() as gateway:
        [session] = await gateway.open(limits={"max_sampled_tokens": 20})
        sampled = (await ask(gateway, session, [ASK])).usage.completion_tokens
    async with life.again() as gateway:
        await ask(gateway, session, [MORE])
        [request] = gateway.engine.requests
        assert request["sampling_params"]["max_new_tokens"] == 20 - sampled > 0


async def test_session_awaits_its_reward_after_a_restart(life: Life):
    async with life.again(late={"deadline_s": 3000.0}) as gateway:
        sessions = judged, stored, silent = await gateway.open(members=3)
        for session in sessions:
            await ask(gateway, session, [ASK])
            answer = await gateway.env(
                f"/sessions/{session.id}/finish", {}, key=session.key
            )
            assert answer.status_code == 202
    deadline = answer.json()["deadline"]
    db = sqlite3.connect(life.store)
    with db:  # the worker died between this reward and what follows from it
        db.execute(
            "UPDATE sessions SET reward=0.25, components='{}' WHERE id=?", (stored.id,)
        )
        db.execute(
            "UPDATE session_times SET reward_deadline=0 WHERE session_id=?",
            (stored.id,),
        )
    db.close()
    async with life.again(
        late={"deadline_s": 3000.0}, session={"ttl_s": 0.01}
    ) as gateway:
        answer = await gateway.env(f"/sessions/{silent.id}/finish", {}, key=silent.key)
        assert answer.status_code == 202
        assert answer.json()["deadline"] == deadline
        turn = gateway.turns(judged)[0].id
        for body in ({"reward": 2.0, "turn": turn}, {"reward": 0.5}):
            answer = await gateway.env(
                f"/sessions/{judged.id}/reward", body, key=judged.key
            )
        assert answer.json()["state"] == "finished"
        await eventually(lambda: len(gateway.store.outbox_after(0)) == 2)
        turns_by_id = {
            o.session_id: o
            for _, o in gateway.store.outbox_after(0)
            if isinstance(o, RolloutSummary)
        }
        assert {name: o.reward for name, o in turns_by_id.items()} == {
            judged.id: 0.5,
            stored.id: 0.25,
        }
        assert turns_by_id[judged.id].turn_rewards == {turn: 2.0}
        assert (await gateway.env("/metrics")).json()["sessions"] == {
            "unrewarded": 1,
            "finished": 2,
        }
    async with life.again(late={"deadline_s": 3000.0}) as gateway:
        assert await gateway.finish(judged, reward=9.0) == turns_by_id[judged.id]


async def test_lease_survives_the_worker_that_gave_it_and_opens_by_a_retry(life: Life):
    lease = GroupLease(
        group_id="g",
        task=Task(id="t", payload={}),
        members=(GroupMember(index=0, attempt=0),),
    )
    async with life.again(leases=True) as gateway:
        store = LeaseStore(life.store)
        store.offer(lease)
        assert (await gateway.env("/tasks/lease", {})).json()["lease"][
            "group_id"
        ] == "g"
    async with life.again(leases=True) as gateway:
        [session] = await gateway.open(request_id="one")
    async with life.again(leases=True) as gateway:
        assert [opened.key for opened in await gateway.open(request_id="one")] == [
            session.key
        ]
        refused = await gateway.env(
            "/sessions",
            {
                "task_id": "t",
                "group_id": "g",
                "members": [{"index": 0}],
                "request_id": "two",
            },
        )
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "not_leased"
        assert store.taken() == []
    store.close()


async def test_rollout_leased_again_in_a_later_incarnation_opens_under_the_same_request_id(
    life: Life,
):
    """An environment may derive its id from the lease, which is the same one in each
    incarnation of a run."""
    lease = GroupLease(
        group_id="g",
        task=Task(id="t", payload={}),
        members=(GroupMember(index=0, attempt=0),),
    )
    opened = []
    for name in ("first", "second"):
        async with life.again(leases=True, incarnation=name) as gateway:
            abandon_open_sessions(life.store)  # as every incarnation of a run begins
            store = LeaseStore(life.store)
            store.offer(lease)
            assert (await gateway.env("/tasks/lease", {})).json()["lease"][
                "group_id"
            ] == "g"
            [session] = await gateway.open(request_id="g-0-0")
            assert await gateway.open(request_id="g-0-0") == [session]
            opened.append(session)
            store.close()
    assert opened[0].id != opened[1].id
