"""The likeliest tokens of each place, in every dialect that shows them; they are not
recorded.

The fake engine's likeliest is the sampled token t, then t + 1, t + 2, ..., each half a
nat below."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import accumulate
from pathlib import Path

import openai
import pytest
from fakes import fake_logprob
from running_gateway import ASK, Running, running

from invrl.engines.sglang_responses import decode_event
from invrl.errors import ServerError
from invrl.gateway.rendering.renderer import Renderer
from invrl.types.sessions import Session

TEXT = "Hi ünïcödé 漢 all of us, and then more"
END = 2
TOP = 3
STREAMED = [False, True]


@pytest.fixture
async def gateway(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Running]:
    async with running(tmp_path, model, renderer) as plain_gateway:
        plain_gateway.engine.script = lambda _: [*renderer.encode(TEXT), END]
        yield plain_gateway


def expected(renderer: Renderer) -> list[list[tuple[str, float]]]:
    """The text and log-prob of the likeliest tokens, place by place."""
    text = renderer._tokenizer
    return [
        [
            (
                text.decode([(token + rank) % 512], special=False),
                pytest.approx(fake_logprob(token) - rank / 2),
            )
            for rank in range(TOP)
        ]
        for token in [*renderer.encode(TEXT), END]
    ]


def shown(logprobs: list) -> list[list[tuple[str, float]]]:
    """Of chat completions and responses, which must agree with what they say of the
    sampled token."""
    for place in logprobs:
        top = place.top_logprobs[0]
        assert top.token == place.token
        assert top.logprob == place.logprob
        assert top.bytes == place.bytes
        assert all(
            bytes(token.bytes).decode() == token.token for token in place.top_logprobs
        )
    return [
        [(token.token, token.logprob) for token in token_logprob.top_logprobs]
        for token_logprob in logprobs
    ]


async def recorded(gateway: Running, session: Session, top: int = TOP) -> None:
    """The engine was asked for them, and the turn is as it is without."""
    assert [request.get("top_logprobs_num") for request in gateway.engine.requests] == [
        top or None
    ]
    [turn] = gateway.turns(session)
    ids = turn.sampled_ids_T.tolist()
    assert turn.logprobs_T == pytest.approx(
        [fake_logprob(token) for token in ids], abs=1e-6
    )


@pytest.mark.parametrize("stream", STREAMED)
async def test_chat_returns_top_logprobs(
    gateway: Running, renderer: Renderer, stream: bool
):
    [session] = await gateway.open()
    answer = await gateway.client(session).chat.completions.create(
        model="tiny", messages=[ASK], logprobs=True, top_logprobs=TOP, stream=stream
    )
    choices = [event.choices[0] async for event in answer] if stream else answer.choices
    streamed = [
        place
        for choice in choices
        if choice.logprobs
        for place in choice.logprobs.content or ()
    ]
    assert shown(streamed) == expected(renderer)
    await recorded(gateway, session)


@pytest.mark.parametrize("stream", STREAMED)
async def test_chat_with_0_top_logprobs_requests_none(gateway: Running, stream: bool):
    [session] = await gateway.open()
    answer = await gateway.client(session).chat.completions.create(
        model="tiny", messages=[ASK], logprobs=True, top_logprobs=0, stream=stream
    )
    choices = [event.choices[0] async for event in answer] if stream else answer.choices
    streamed = [
        place
        for choice in choices
        if choice.logprobs
        for place in choice.logprobs.content or ()
    ]
    assert streamed
    assert all(token.top_logprobs == [] for token in streamed)
    await recorded(gateway, session, top=0)


@pytest.mark.parametrize("stream", STREAMED)
async def test_completions_return_top_logprobs(
    gateway: Running, renderer: Renderer, stream: bool
):
    """A dictionary by text: of tokens that look alike (pieces of characters) the
    likeliest stays."""
    [session] = await gateway.open()
    answer = await gateway.client(session).completions.create(
        model="tiny", prompt="Q", logprobs=TOP, max_tokens=60, stream=stream
    )
    pieces = [event.choices[0] async for event in answer] if stream else answer.choices
    streamed = [piece.logprobs for piece in pieces if piece.logprobs]
    wanted = [dict(reversed(place)) for place in expected(renderer)]
    assert [
        token for piece_logprobs in streamed for token in piece_logprobs.top_logprobs
    ] == wanted
    tokens = [token for piece_logprobs in streamed for token in piece_logprobs.tokens]
    assert [
        offset for piece_logprobs in streamed for offset in piece_logprobs.text_offset
    ] == [
        0,
        *accumulate(map(len, tokens)),
    ][:-1]
    await recorded(gateway, session)


@pytest.mark.parametrize("stream", STREAMED)
async def test_responses_return_top_logprobs(
    gateway: Running, renderer: Renderer, stream: bool
):
    [session] = await gateway.open()
    answer = await gateway.client(session).responses.create(
        model="tiny",
        input="Hi",
        include=["message.output_text.logprobs"],
        top_logprobs=TOP,
        stream=stream,
    )
    if stream:
        events = [event async for event in answer]
        deltas = [
            event for event in events if event.type == "response.output_text.delta"
        ]
        streamed = [
            token for event in deltas for token in event.model_dump()["logprobs"]
        ]
        answer = events[-1].response
        final = answer.output[0].content[0].model_dump()["logprobs"]
        assert [token["token"] for token in streamed] == [
            token["token"] for token in final
        ]
        assert [token["top_logprobs"] for token in streamed] == [
            token["top_logprobs"] for token in final
        ]
    assert answer.top_logprobs == TOP
    assert shown(answer.output[0].content[0].logprobs) == expected(renderer)
    await recorded(gateway, session)


async def test_invalid_top_logprobs_are_refused_and_unrequested_ones_are_not_shown(
    gateway: Running,
):
    [session] = await gateway.open()
    client = gateway.client(session)
    chat = {"model": "tiny", "messages": [ASK]}
    with pytest.raises(openai.BadRequestError, match="needs `logprobs`"):
        await client.chat.completions.create(**chat, top_logprobs=2)
    for top in (21, -1):
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            await client.chat.completions.create(
                **chat, logprobs=True, top_logprobs=top
            )
    # log-probs are not included
    await client.responses.create(model="tiny", input="Hi", top_logprobs=2)
    await recorded(gateway, session, top=0)


@pytest.mark.parametrize(
    "answer",
    [
        b'{"meta_info": {"id"',
        b"\xff",
        b'{"meta_info": 3}',
        b'{"meta_info": {"output_token_logprobs": [[null, 1]]}}',
    ],
)
def test_unreadable_engine_reply_is_a_server_error(answer: bytes):
    with pytest.raises(ServerError, match="cannot be read"):
        decode_event(answer)
