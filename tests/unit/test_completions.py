"""`/v1/completions` as its clients see it: raw prompts, continued with the exact ids of
what came before."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from running_gateway import Running, eventually, running
from tool_replies import PARSERS

from invrl.gateway.rendering.renderer import Renderer
from invrl.types.rollouts import RolloutSummary

END = 2
HEAD = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
MORE = "<|im_end|>\n<|im_start|>user\nSure? 🙂<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
async def gateway(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Running]:
    parsers = PARSERS
    async with running(tmp_path, model, renderer, parsers) as gateway_with_parsers:
        yield gateway_with_parsers


def spelled(renderer: Renderer, text: str) -> list[int]:
    """Ids of a text, one byte each: not as the tokenizer would write it."""
    return [token for letter in text for token in renderer.encode(letter)]


async def test_continued_prompt_keeps_the_sampled_ids(
    gateway: Running, renderer: Renderer
):
    sampled = [*spelled(renderer, "the user"), END]
    assert sampled[:-1] != renderer.encode("the user")
    gateway.engine.script = lambda _: sampled
    [session] = await gateway.open()
    create = gateway.client(session).completions.create
    first = await create(model="tiny", prompt=HEAD, max_tokens=60)
    assert first.choices[0].text == "the user"
    assert first.choices[0].finish_reason == "stop"
    assert first.usage is not None
    assert first.usage.completion_tokens == len(sampled)
    text = HEAD + first.choices[0].text + MORE
    second = await create(model="tiny", prompt=text, max_tokens=60)
    text += second.choices[0].text + MORE
    await create(model="tiny", prompt=[text], max_tokens=60)
    await create(model="tiny", prompt=HEAD + "the tool" + MORE, max_tokens=60)
    turns = gateway.turns(session)
    assert [turn.parent_id for turn in turns] == [None, turns[0].id, turns[1].id, None]
    assert [turn.fork_reason for turn in turns] == ["", "", "", "new_conversation"]
    rest = renderer.encode(MORE.removeprefix("<|im_end|>"))
    assert turns[1].context_ids_T.tolist() == rest
    path = [*renderer.encode(HEAD), *sampled]
    prompts = [request["input_ids"] for request in gateway.engine.requests]
    assert prompts[:3] == [
        renderer.encode(HEAD),
        [*path, *rest],
        [*path, *rest, *sampled, *rest],
    ]
    summary = await gateway.finish(session)
    assert isinstance(summary, RolloutSummary)
    assert summary.trained_tokens == 4 * len(sampled)


async def test_stop_string_repeated_by_the_prompt_is_part_of_the_path(
    gateway: Running, renderer: Renderer
):
    sampled = renderer.encode("Look up.\nResult:")
    gateway.engine.script = lambda _: sampled
    [session] = await gateway.open()
    create = gateway.client(session).completions.create
    first = await create(
        model="tiny", prompt="Q", stop="Result:", max_tokens=len(sampled)
    )
    assert first.choices[0].text == "Look up.\n"
    await create(
        model="tiny", prompt="Q" + first.choices[0].text + "Result: 5", max_tokens=5
    )
    turns = gateway.turns(session)
    assert turns[1].parent_id == turns[0].id
    assert turns[1].context_ids_T.tolist() == renderer.encode(" 5")


@pytest.mark.parametrize("as_ids", [False, True])
async def test_prompt_that_keeps_a_cancelled_reply_is_named(
    gateway: Running, renderer: Renderer, *, as_ids: bool
):
    sampled = spelled(renderer, "the user asks")
    gateway.engine.script = lambda _: [*sampled, END]
    gateway.engine.holds = lambda count: count > 5
    [session] = await gateway.open()
    create = gateway.client(session).completions.create
    stream = await create(model="tiny", prompt=HEAD, max_tokens=60, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await eventually(
        lambda: [t.finish_reason for t in gateway.turns(session)] == ["abort"]
    )
    gateway.engine.holds = lambda count: False
    [cancelled] = gateway.turns(session)
    sampled_ids = cancelled.sampled_ids_T.tolist()
    prompt: str | list[int] = HEAD + renderer.decode(sampled_ids, inside=True) + MORE
    if as_ids:
        context_ids = cancelled.context_ids_T.tolist()
        prompt = [*context_ids, *sampled_ids, *renderer.encode(MORE)]
    await create(model="tiny", prompt=prompt, max_tokens=60)
    turn = gateway.turns(session)[1]
    assert (turn.parent_id, turn.fork_reason) == (None, "interrupted_reply")


async def test_completions_accept_prompts_of_ids(gateway: Running, renderer: Renderer):
    sampled = [*spelled(renderer, "one"), END]
    gateway.engine.script = lambda _: sampled
    [session] = await gateway.open()
    create = gateway.client(session).completions.create
    head = spelled(renderer, "What")
    await create(model="tiny", prompt=head)
    await create(model="tiny", prompt=[[*head, *sampled, 20, 21]])
    await create(model="tiny", prompt=[*renderer.encode("What"), *sampled, 20, 21])
    turns = gateway.turns(session)
    assert [turn.parent_id for turn in turns] == [None, turns[0].id, None]
    assert turns[1].context_ids_T.tolist() == [20, 21]
    assert gateway.engine.requests[1]["input_ids"] == [*head, *sampled, 20, 21]
    assert gateway.engine.requests[0]["sampling_params"]["max_new_tokens"] == 16


async def test_completions_return_several_choices_with_logprobs_whole_and_streamed(
    gateway: Running, renderer: Renderer
):
    reply = [*renderer.encode("Hi 漢<think>🙂"), END]  # no template: nothing is parsed
    gateway.engine.script = lambda _: reply
    [session] = await gateway.open(purpose="serve")
    create = gateway.client(session).completions.create
    whole = await create(
        model="tiny", prompt="Q", max_tokens=60, logprobs=0, n=2, temperature=0.5
    )
    assert [choice.text for choice in whole.choices] == ["Hi 漢<think>🙂"] * 2
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 2 * len(reply)
    assert gateway.engine.requests[0]["sampling_params"]["temperature"] == 0.5
    shown = whole.choices[1].logprobs
    assert shown is not None
    assert shown.tokens is not None
    assert shown.text_offset == [
        len("".join(shown.tokens[:at])) for at in range(len(reply))
    ]
    stream = await create(
        model="tiny",
        prompt="Q",
        max_tokens=60,
        logprobs=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = [event async for event in stream]
    pieces = [event.choices[0] for event in events if event.choices]
    assert "".join(piece.text for piece in pieces) == "Hi 漢<think>🙂"
    assert [piece.finish_reason for piece in pieces][-2:] == [None, "stop"]
    streamed_logprobs = [piece.logprobs for piece in pieces if piece.logprobs]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [
            value
            for piece_logprobs in streamed_logprobs
            for value in getattr(piece_logprobs, name)
        ] == getattr(shown, name)
    assert events[-1].usage.completion_tokens == len(reply)
    assert {turn.parent_id for turn in gateway.turns(session)} == {None}


async def test_chat_and_completions_of_a_session_do_not_mix(
    gateway: Running, renderer: Renderer
):
    gateway.engine.script = lambda _: [*renderer.encode("Yes"), END]
    [session] = await gateway.open()
    client = gateway.client(session)
    ask = {"role": "user", "content": "What?"}
    await client.chat.completions.create(model="tiny", messages=[ask])
    done = await client.completions.create(model="tiny", prompt=HEAD + "Yes" + MORE)
    with pytest.raises(openai.BadRequestError, match="not of this session"):
        await client.responses.create(
            model="tiny",
            input="x",
            previous_response_id=done.id.replace("cmpl-", "resp_"),
        )
    reply = {"role": "assistant", "content": "Yes"}
    await client.chat.completions.create(model="tiny", messages=[ask, reply, ask])
    turns = gateway.turns(session)
    assert [turn.parent_id for turn in turns] == [None, None, turns[0].id]


BAD_FIELDS = {
    "several prompts": {"prompt": ["a", "b"]},
    "several id prompts": {"prompt": [[1], [2]]},
    "mixed": {"prompt": [1, "a"]},
    "empty": {"prompt": ""},
    "no ids": {"prompt": []},
    "empty in list": {"prompt": [[]]},
    "null": {"prompt": None},
    "outside of the vocabulary": {"prompt": [5, 512]},
    "negative id": {"prompt": [-1]},
    "id in text": {"prompt": [[1, "a"]]},
    "echo": {"echo": True},
    "suffix": {"suffix": "x"},
    "best_of": {"best_of": 2},
    "logprobs": {"logprobs": 21},
    "n": {"n": 0},
    "max_tokens": {"max_tokens": 0},
    "stop": {"stop": [""]},
    "messages": {"messages": [{"role": "user", "content": "x"}]},
    "misspelt": {"max_tokns": 3},
    "stream_options": {"stream_options": {"include_usage": True}},
    "top_k": {"top_k": 0},
    "too long": {"prompt": [5] * 2000},
}


async def test_bad_completions_body_is_a_400_in_openais_shape(gateway: Running):
    [session] = await gateway.open()
    for name, fields in BAD_FIELDS.items():
        body = json.dumps({"model": "tiny", "prompt": "x"} | fields)
        answer = await gateway.http.post(
            session.base_url + "/completions", content=body
        )
        assert answer.status_code == 400, (name, answer.text)
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
    assert gateway.engine.requests == []
