"""Nothing of one session reaches another: 2,000 at once, each with a canary of its own,
0 crossings.

The reply repeats the canary of its prompt, so that a crossing shows wherever it
happens: a prompt rendered of another's messages, an answer sent to another's client, a
turn stored under another's session."""

from __future__ import annotations

import asyncio
import json
import re
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from running_gateway import running

from invrl.gateway.rendering.renderer import Renderer
from invrl.types.sessions import Session

pytestmark = pytest.mark.slow

SESSIONS = 2000
CANARY = re.compile(r"canary-(\d{4})-end")
ROUTES = ("/chat/completions", "/completions", "/responses", "/messages")


def body(path: str, text: str, reply: str, stream: bool) -> dict[str, Any]:
    """The first request of a session; with a `reply` to it, the one that goes on."""
    first = {"role": "user", "content": text}
    more = {"role": "user", "content": "Again."}
    messages = (
        [first, {"role": "assistant", "content": reply}, more] if reply else [first]
    )
    match path:
        case "/completions":
            asked = {"prompt": text + reply}
        case "/responses":
            asked = {"input": messages}
        case _:
            asked = {"messages": messages, "max_tokens": 32}
    return {"model": "tiny", "stream": stream, **asked}


def shown(path: str, raw: str, stream: bool) -> str:
    """The text of the answer."""
    events = [
        json.loads(line[6:]) for line in raw.splitlines() if line[:7] == "data: {"
    ]
    whole = {} if stream else json.loads(raw)
    match path, stream:
        case "/chat/completions", True:
            return "".join(
                c["delta"].get("content") or "" for e in events for c in e["choices"]
            )
        case "/chat/completions", False:
            return whole["choices"][0]["message"]["content"]
        case "/completions", True:
            return "".join(
                choice["text"] for event in events for choice in event["choices"]
            )
        case "/completions", False:
            return whole["choices"][0]["text"]
        case "/responses", True:
            return "".join(
                e["delta"] for e in events if e["type"] == "response.output_text.delta"
            )
        case "/responses", False:
            return "".join(
                part["text"] for item in whole["output"] for part in item["content"]
            )
        case "/messages", True:
            return "".join(
                e["delta"]["text"] for e in events if e["type"] == "content_block_delta"
            )
        case _:
            return "".join(block["text"] for block in whole["content"])


async def test_canaries_of_2000_concurrent_sessions_never_cross(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
):
    """Every second session streams, the dialects take turns, and each session asks
    twice: a first answer, then what goes on from it. All first requests are in flight
    together before the engine answers any."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < (needed := 5 * SESSIONS):  # four sockets of this process per session
        pytest.skip(f"needs {needed} file descriptors, this machine allows {most}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
    limits = {
        "max_open_sessions": SESSIONS,
        "max_new_tokens": 32,
        "generate_timeout_s": 500.0,
    }

    all_have_asked = asyncio.Event()

    def repeat(prompt: Sequence[int]) -> list[int]:
        canaries = CANARY.findall(renderer.decode(prompt))
        assert len(set(canaries)) == 1, f"one prompt holds the canaries {set(canaries)}"
        return [*renderer.encode(f"canary-{canaries[0]}-end"), 2]

    async with running(tmp_path, model, renderer, **limits) as gateway:
        gateway.engine.script = repeat
        answer_one = gateway.engine._answer

        async def answer_when_all_have_asked(*request: Any) -> Any:
            if len(gateway.engine.requests) >= SESSIONS:
                all_have_asked.set()
            await all_have_asked.wait()
            return await answer_one(*request)

        gateway.engine._answer = answer_when_all_have_asked
        sessions = await gateway.open(members=SESSIONS)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()
        ) as http:

            async def agent(number: int, session: Session) -> list[str]:
                path = ROUTES[number % 4]
                stream = number // 4 % 2 == 1
                own = f"canary-{number:04}-end"
                reply = ""
                seen = []
                for _ in range(2):
                    asks = body(path, f"Say {own}", reply, stream)
                    async with http.post(
                        f"{gateway.url}/s/{session.key}/v1{path}", json=asks
                    ) as answer:
                        raw = await answer.text()
                        assert answer.status == 200, raw
                    reply = shown(path, raw, stream)
                    seen.append(reply)
                    assert set(CANARY.findall(raw)) <= {f"{number:04}"}
                return seen

            answers = await asyncio.gather(
                *(agent(n, own_session) for n, own_session in enumerate(sessions))
            )
        stored = 0
        for number, session in enumerate(sessions):
            assert answers[number] == [f"canary-{number:04}-end"] * 2
            for turn in gateway.turns(session):
                stored += 1
                text = renderer.decode(turn.context_ids_T.tolist()) + renderer.decode(
                    turn.sampled_ids_T.tolist()
                )
                assert set(CANARY.findall(text)) == {f"{number:04}"}
        assert stored == 2 * SESSIONS
