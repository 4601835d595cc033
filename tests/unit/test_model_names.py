"""The names under which clients call the one model: any in training, those of the
server in serving."""

import json

import openai
import pytest
from running_gateway import ASK, Running, running
from sampling_routes import ROUTES, Route

from invrl.cli.flags import parse_flags
from invrl.gateway.rendering.renderer import Renderer
from invrl.run.settings.config import resolve

every_route = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path[1:])


@every_route
async def test_a_training_session_takes_any_name_and_says_so_once(
    gateway: Running, route: Route
):
    [session] = await gateway.open()
    url = session.base_url + route.path
    reported = []
    for number, name in enumerate(("gpt-4o", "claude-opus-4", None, "tiny")):
        body = {**route.good, "model": name}
        if name is None:
            del body["model"]
        answer = await gateway.http.post(url, json=body | {"user": str(number)})
        assert answer.status_code == 200, answer.text
        assert answer.json().get("model", "tiny") == "tiny"
        reported.append(answer.headers.get("x-invrl-overridden"))
    view = await gateway.env(f"/sessions/{session.id}")
    if route.path.endswith("count_tokens"):
        assert view.json()["overridden"] == []  # nothing is sampled
        return
    assert reported == ["model", None, None, None]
    assert view.json()["overridden"] == ["model"]


async def test_a_name_that_the_model_has_is_not_overridden(gateway: Running):
    [session] = await gateway.open()
    for body in (
        {"model": "tiny", "messages": [ASK]},
        {"messages": [ASK], "model": None},
    ):
        answer = await gateway.http.post(
            session.base_url + "/chat/completions", json=body
        )
        assert answer.status_code == 200
        assert "x-invrl-overridden" not in answer.headers


async def test_a_training_session_shows_the_model_under_any_name(gateway: Running):
    [session] = await gateway.open()
    card = await gateway.client(session).models.retrieve("gpt-4o")
    assert card.id == "gpt-4o"
    assert card.model_dump()["max_model_len"] == 1024
    headers = {"anthropic-version": "2023-06-01"}
    claude = await gateway.http.get(
        session.base_url + "/models/claude-opus-4", headers=headers
    )
    assert claude.json()["id"] == "claude-opus-4"
    assert claude.json()["max_input_tokens"] == 1024


async def test_a_server_has_all_names_that_it_was_given(
    tmp_path, model, renderer: Renderer
):
    async with running(
        tmp_path, model, renderer, model_aliases=["small", "large/v2"]
    ) as served:
        [session] = await served.open(purpose="serve")
        client = served.client(session)
        assert [card.id for card in (await client.models.list()).data] == [
            "tiny",
            "small",
            "large/v2",
        ]
        for name in ("tiny", "small", "large/v2"):
            answer = await client.chat.completions.create(model=name, messages=[ASK])
            assert answer.model == "tiny"
            assert (await client.models.retrieve(name)).id == name
        with pytest.raises(openai.NotFoundError, match="`tiny`, `small`, `large/v2`"):
            await client.chat.completions.create(model="gpt-4o", messages=[ASK])
        unnamed = await served.http.post(
            session.base_url + "/chat/completions", json={"messages": [ASK]}
        )
        assert unnamed.status_code == 200, unnamed.text


def test_served_model_name_may_be_given_several_times(tmp_path):
    folder = tmp_path / "qwen"
    arguments = ["--model-path", str(folder)]
    assert resolve(*parse_flags(arguments, command="serve")).model.names == ("qwen",)
    for names in (["a", "--served-model-name", "b"], ["a", "b"], ["a,b"]):
        sources = parse_flags(
            [*arguments, "--served-model-name", *names], command="serve"
        )
        assert resolve(*sources).model.names == ("a", "b"), json.dumps(names)
