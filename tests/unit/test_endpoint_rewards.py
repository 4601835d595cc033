"""What a rollout function can do beside asking the model: reward a turn, a branch, a
child; open a child."""

import asyncio

import httpx
import pytest
from running_gateway import ASK, MORE, Running

from invrl.errors import DeadlineError, SessionError
from invrl.rollout.workers.endpoint import ConnectionPool, SessionEndpoint
from invrl.rollout.workers.runner import Runner, classify
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import RolloutSummary
from invrl.types.sessions import Session
from invrl.types.tasks import Task


def endpoint_of(session: Session) -> SessionEndpoint:
    return SessionEndpoint(session, model="tiny", timeout_s=60.0, pool=ConnectionPool())


async def test_turns_trajectories_and_children_are_rewarded(gateway: Running):
    [session] = await gateway.open()
    endpoint = endpoint_of(session)
    client = endpoint.openai()
    first = await client.chat.completions.create(model="x", messages=[ASK])
    await endpoint.reward(0.25, turn=first.id, components={"short": 1.0})
    reply = first.choices[0].message.model_dump()
    second = await client.chat.completions.create(
        model="x", messages=[ASK, reply, MORE]
    )
    await endpoint.reward(0.5, branch=second.id)
    child = await endpoint.open_child()
    grandchild = await child.open_child()
    for sub_agent in (child, grandchild):
        await sub_agent.openai().chat.completions.create(model="x", messages=[ASK])
    await child.reward(0.75)
    view = (await gateway.env(f"/sessions/{session.id}")).json()
    first_turn, second_turn = (turn["id"] for turn in view["turns"])
    assert view["turn_rewards"][first_turn]["value"] == 0.25
    assert view["turn_rewards"][first_turn]["components"] == {"short": 1.0}
    assert view["branch_rewards"][second_turn]["value"] == 0.5
    assert len(view["children"]) == 1
    summary = await gateway.finish(session, reward=1.0)
    assert isinstance(summary, RolloutSummary)
    assert sorted(summary.child_rewards.values()) == [0.75, 0.75]
    assert summary.turn_rewards == {first_turn: 0.25}


async def test_a_sync_function_rewards_from_its_thread(gateway: Running):
    [session] = await gateway.open()

    def rollout(task: Task, endpoint: SessionEndpoint) -> float:
        async def work() -> None:
            answer = await endpoint.openai().chat.completions.create(
                model="x", messages=[ASK]
            )
            await endpoint.reward(0.5, turn=answer.id)
            child = await endpoint.open_child()
            await child.reward(0.5)

        asyncio.run(work())
        return 1.0

    runner = Runner(rollout, None, timeout_s=60.0)
    [result] = await runner.run(Task(id="t", payload={}), [endpoint_of(session)])
    assert getattr(result, "reward", result) == 1.0


async def test_a_reward_of_no_turn_says_what_to_name_and_shows_no_key(gateway: Running):
    [session] = await gateway.open()
    keys = [session.key]

    async def rollout(task: Task, endpoint: SessionEndpoint) -> float:
        child = await endpoint.open_child()
        keys.append(child.api_key)
        try:
            await child.reward(0.5, turn="chatcmpl-x")
        except SessionError as error:
            raise ValueError(f"at {child.base_url}") from error
        return 1.0

    runner = Runner(rollout, None, timeout_s=60.0)
    [failure] = await runner.run(Task(id="t", payload={}), [endpoint_of(session)])
    assert failure.reason is FailureReason.EXCEPTION
    assert (
        "has no turn 'chatcmpl-x'; use the id of one of its answers" in failure.detail
    )
    assert not any(key in failure.detail for key in keys)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            SessionError("gone", status=503, code="engine_unavailable"),
            FailureReason.ENGINE,
        ),
        (
            SessionError("late", status=401, code="session_timeout"),
            FailureReason.TIMEOUT,
        ),
        (
            SessionError("no turn", status=404, code="turn_not_found"),
            FailureReason.EXCEPTION,
        ),
        (DeadlineError("the gateway", 1.0), FailureReason.ENGINE),
    ],
)
def test_a_reward_that_fails_has_the_reason_of_a_request_that_fails(
    error: Exception, reason: FailureReason
):
    assert classify(error, []).reason is reason


async def test_a_reward_takes_the_id_that_any_client_saw(gateway: Running):
    [session] = await gateway.open()
    bodies = {
        "/chat/completions": {"messages": [ASK]},
        "/completions": {"prompt": "Hi"},
        "/responses": {"input": "Hi there"},
        "/messages": {"messages": [MORE], "max_tokens": 9},
    }
    headers = {"authorization": f"Bearer {session.key}"}
    for path, body in bodies.items():
        answer = await gateway.http.post(session.base_url + path, json=body)
        assert answer.headers["x-invrl-session"] == session.id
        for name in (answer.json()["id"], answer.headers["x-request-id"]):
            rewarded = await gateway.http.post(
                f"{gateway.url}/sessions/{session.id}/reward",
                json={"reward": 0.5, "turn": name},
                headers=headers,
            )
            assert rewarded.status_code == 200, rewarded.text
    view = (await gateway.env(f"/sessions/{session.id}")).json()
    assert set(view["turn_rewards"]) == {turn["id"] for turn in view["turns"]}


async def test_every_answer_of_an_agent_names_its_session(gateway: Running):
    [session] = await gateway.open()
    url = session.base_url + "/chat/completions"
    streamed = await gateway.http.post(url, json={"messages": [ASK], "stream": True})
    refused = await gateway.http.post(url, content=b"{")
    unknown: httpx.Response = await gateway.http.post(
        f"{gateway.url}/s/isk-x/v1/chat/completions", json={}
    )
    assert streamed.headers["x-invrl-session"] == session.id
    assert refused.headers["x-invrl-session"] == session.id
    assert "x-invrl-session" not in unknown.headers
