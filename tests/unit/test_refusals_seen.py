"""What the gateway refused an agent that swallows errors: shown in its session, its
failure, the console."""

from running_gateway import ASK, Running

from invrl.buffer.failures import shown_detail
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout

CHAT = {"model": "tiny", "messages": [ASK]}


async def test_refusals_stand_in_the_failure_of_their_session(gateway: Running):
    [session] = await gateway.open()
    base = f"{gateway.url}/s/{session.key}"
    for _ in range(2):
        await gateway.http.post(base + "/chat/completions", json=CHAT)
    await gateway.http.post(
        base + "/v1/chat/completions", json=CHAT | {"temperature": "hot"}
    )
    view = (await gateway.env(f"/sessions/{session.id}")).json()
    lost, wrong = view["refused"]
    assert lost.startswith(
        "404 not_found: POST /s/…: Not Found; did you mean /v1/chat/completions?"
    )
    assert wrong.startswith("400 invalid_request: ")
    assert "temperature" in wrong
    failure = await gateway.finish(session, reward=0.0)
    assert isinstance(failure, FailedRollout)
    assert failure.reason is FailureReason.EMPTY
    shown = shown_detail(failure.detail)
    assert f"the gateway refused a request: {lost}" in shown
    assert f"the gateway refused a request: {wrong}" in shown
    assert session.key not in failure.detail


async def test_a_childs_refusals_stand_in_its_parents_failure(gateway: Running):
    [session] = await gateway.open()
    opened = await gateway.env(f"/sessions/{session.id}/children", {}, key=session.key)
    [child] = opened.json()["sessions"]
    await gateway.http.post(child["base_url"] + "/responses", json={"input": []})
    failure = await gateway.finish(session)
    assert isinstance(failure, FailedRollout)
    assert "`input` must not be empty" in failure.detail


async def test_the_line_of_user_code_stays_the_last_one(gateway: Running):
    [session] = await gateway.open()
    await gateway.http.post(
        session.base_url + "/chat/completions", json={"messages": []}
    )
    detail = (
        "Traceback\n  File x\nValueError: no reply\nat my_agent.py:3, in rollout: raise"
    )
    body = {"reason": "exception", "detail": detail}
    ended = await gateway.env(f"/sessions/{session.id}/abort", body, key=session.key)
    *_, message, refused, place = ended.json()["detail"].split("\n")
    assert message == "ValueError: no reply"
    assert "`messages` must not be empty" in refused
    assert place == "at my_agent.py:3, in rollout: raise"


async def test_what_the_failure_says_already_is_not_said_again(gateway: Running):
    [session] = await gateway.open()
    await gateway.http.post(
        session.base_url + "/chat/completions", json={"messages": []}
    )
    detail = "BadRequestError: `messages` must not be empty"
    ended = await gateway.env(
        f"/sessions/{session.id}/abort",
        {"reason": "exception", "detail": detail},
        key=session.key,
    )
    assert ended.json()["detail"] == detail
