"""A request's model name chooses an adapter, in every dialect."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from running_gateway import Running, running
from sampling_routes import ROUTES, Route

from invrl.gateway.rendering.renderer import Renderer

GOOGLE = {"contents": [{"role": "user", "parts": [{"text": "What is 12*13?"}]}]}
SAMPLING = [route for route in ROUTES if route.limit]


@pytest.fixture
async def served(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Running]:
    """The model `tiny` with two adapters."""
    async with running(
        tmp_path, model, renderer, adapters=["sums", "words/v2"]
    ) as gateway:
        yield gateway


def adapters_asked(gateway: Running) -> list[str | None]:
    return [request.get("lora_path") for request in gateway.engine.requests]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", SAMPLING, ids=lambda route: route.path[1:])
async def test_the_name_in_a_body_chooses_an_adapter_and_is_in_the_answer(
    served: Running, route: Route, stream: bool
) -> None:
    [session] = await served.open(purpose="serve")
    for name in ("tiny", "sums", "words/v2"):
        body = {**route.good, "model": name, "stream": stream}
        answer = await served.http.post(session.base_url + route.path, json=body)
        assert answer.status_code == 200, answer.text
        assert "x-invrl-overridden" not in answer.headers
        assert models_in(answer.text, stream=stream) == {name}
    assert adapters_asked(served) == [None, "sums", "words/v2"]


def models_in(text: str, *, stream: bool) -> set[str]:
    """Return the names of models in an answer, or in the events of a stream."""
    bodies = [text]
    if stream:
        lines = [line.removeprefix("data: ") for line in text.splitlines()]
        bodies = [line for line in lines if line.startswith("{")]
    found: set[str] = set()
    for body in map(json.loads, bodies):
        for part in (body, body.get("message"), body.get("response")):
            if isinstance(part, dict):
                found |= {part[key] for key in ("model", "modelVersion") if key in part}
    return found


@pytest.mark.parametrize("method", ["generateContent", "streamGenerateContent?alt=sse"])
async def test_the_name_in_a_google_path_chooses_an_adapter(
    served: Running, method: str
) -> None:
    [session] = await served.open(purpose="serve")
    url = f"{session.base_url}beta/models"

    async def ask(name: str, *, retry: int) -> Any:
        headers = {"x-stainless-retry-count": str(retry)}
        path = f"{url}/{name}:{method}"
        return await served.http.post(path, json=GOOGLE, headers=headers)

    # Equal bodies: that of another model is no retry of the first, which it claims.
    answers = [await ask("tiny", retry=0), await ask("sums", retry=1)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert adapters_asked(served) == [None, "sums"]
    assert (await ask("sums", retry=1)).status_code == 200
    assert adapters_asked(served) == [None, "sums"]
    for answer, name in zip(answers, ("tiny", "sums"), strict=True):
        assert models_in(answer.text, stream="alt" in method) == {name}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path[1:])
async def test_an_unknown_name_is_refused_with_all_that_exist(
    served: Running, route: Route
) -> None:
    [session] = await served.open(purpose="serve")
    body = {**route.good, "model": "sum"}
    answer = await served.http.post(session.base_url + route.path, json=body)
    route.check(answer, 404, "model_not_found")
    assert "`tiny`, `sums`, `words/v2`" in answer.text
    assert served.engine.requests == []


async def test_adapters_are_listed_beside_the_model(served: Running) -> None:
    [session] = await served.open(purpose="serve")
    client = served.client(session)
    listed = [card.id for card in (await client.models.list()).data]
    assert listed == ["tiny", "sums", "words/v2"]
    assert (await client.models.retrieve("words/v2")).id == "words/v2"
