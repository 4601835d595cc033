"""How long the answers of `invrl serve` may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from running_gateway import ASK, running
from tiny_model import make_tiny_model

from invrl.cli.commands.serve import with_long_answers
from invrl.engines.client.sglang_client import EngineLimits
from invrl.gateway.rendering.renderer import Renderer
from invrl.run.settings.config import Source, resolve


def source(tables: dict[str, Any]) -> Source:
    return Source(name="test", tables=tables)


def test_served_replies_are_limited_by_the_context_unless_set(tmp_path: Path):
    model_path = make_tiny_model(tmp_path / "tiny")
    folder = {"model": {"model_path": str(model_path)}}
    engine = {"engine": {"max_total_tokens": 900}}
    served = with_long_answers(resolve(source(folder | engine)))
    limits = EngineLimits.of(model_path, max_total_tokens=900)
    assert served.rollout.max_new_tokens == limits.context_length < 900
    for bound in (512, 100):  # the default too, where it was asked for
        asked = resolve(
            source(folder | engine | {"rollout": {"max_new_tokens": bound}})
        )
        assert with_long_answers(asked).rollout.max_new_tokens == bound


@pytest.mark.parametrize("sampling", [None, {"temperature": 0.5}])
async def test_served_reply_without_a_limit_ends_with_the_context(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
    sampling: dict[str, float] | None,
):
    async with running(
        tmp_path, model, renderer, max_new_tokens=9000, context_length=900
    ) as gateway:
        [session] = await gateway.open(purpose="serve", sampling=sampling)
        await gateway.client(session).chat.completions.create(
            model="tiny", messages=[ASK]
        )
        [request] = gateway.engine.requests
        asked = request["sampling_params"]["max_new_tokens"]
        assert asked + len(request["input_ids"]) == 900 - 8  # the engine's margin


async def test_tools_without_a_template_for_them_name_the_flag(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
):
    # no parser: as for a template without tools
    async with running(tmp_path, model, renderer) as gateway:
        [session] = await gateway.open()
        tool = {"type": "function", "function": {"name": "calc"}}
        answer: httpx.Response = await gateway.http.post(
            session.base_url + "/chat/completions",
            json={
                "model": "tiny",
                "messages": [ASK],
                "tools": [tool],
            },
        )
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "--chat-template-path" in message
        assert "chatml-tools" in message
