"""Equal tools are one object in the gateway, whoever sends them, and before and after a
worker's death."""

from __future__ import annotations

import gc
from pathlib import Path

from running_gateway import ASK, Running, running
from tiny_model import make_tiny_model

from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.replies.parsers import choose_parsers
from invrl.gateway.rendering.tool_calls.shared_tools import SharedTools
from invrl.gateway.types import Tool
from invrl.types.sessions import Session

DESCRIPTION = "what only the tools of this test say " * 1_000
OFFERED = [
    {
        "type": "function",
        "function": {"name": f"tool_{number}", "description": DESCRIPTION},
    }
    for number in range(3)
]


def test_equal_tools_are_one_shared_object_while_in_use():
    shared = SharedTools()
    first = shared.share([Tool(name="a", parameters="{}"), Tool(name="b")])
    again = shared.share(
        [Tool(name="b"), Tool(name="a", parameters="{}"), Tool(name="a")]
    )
    assert again[0] is first[1]
    assert again[1] is first[0]
    assert again[2] not in first
    assert len(shared._known) == 3
    del first, again
    assert len(shared._known) == 0


async def talk(
    gateway: Running, session: Session, history: list[object], turns: int
) -> None:
    url = f"{gateway.url}/s/{session.key}/v1/chat/completions"
    for _ in range(turns):
        body = {
            "model": "tiny",
            "messages": history,
            "tools": OFFERED,
            "max_tokens": 4,
        }
        answer = await gateway.http.post(url, json=body)
        assert answer.status_code == 200, answer.text
        history += [answer.json()["choices"][0]["message"], ASK]


def held(earlier: list[Tool]) -> list[Tool]:
    """The tools in memory beside those of gateways that live on in the process although
    they have ended."""
    gc.collect()
    texts = [
        instance
        for instance in gc.get_objects()
        if isinstance(instance, Tool) and instance.description == DESCRIPTION
    ]
    return [
        instance
        for instance in texts
        if not any(instance is other for other in earlier)
    ]


async def test_sessions_and_restored_sessions_share_their_tools(tmp_path: Path):
    model = make_tiny_model(tmp_path / "tiny")
    template = "chatml-tools"
    parsers = choose_parsers(
        "auto", "auto", load_renderer(str(model), 512, chat_template=template)
    )
    histories: list[list[object]] = [[ASK], [ASK]]
    sessions: list[Session] = []
    turns: list[int] = []
    for _ in range(2):  # the second gateway finds what the first one recorded
        earlier = held([])
        renderer = load_renderer(str(model), 512, chat_template=template)
        async with running(
            tmp_path, model, renderer, parsers, context_length=500_000
        ) as gateway:
            sessions = sessions or await gateway.open(members=2)
            for session, history in zip(sessions, histories, strict=True):
                await talk(gateway, session, history, 3)
                assert (
                    gateway.turns(session)[-1].parent_id
                    == gateway.turns(session)[-2].id
                )
            assert len(held(earlier)) == len(OFFERED)
            turns = [len(gateway.turns(session)) for session in sessions]
    assert turns == [6, 6]
