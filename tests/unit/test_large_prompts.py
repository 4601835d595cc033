"""A large request is worked on beside the event loop: other sessions and /health do not
wait for it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from running_gateway import ASK, MORE, eventually, running
from slow_cases import first_quick, named_quick

from invrl.gateway.dialects.chat import ChatDialect
from invrl.gateway.rendering.prompt_cache import PromptCache
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.tokenizer import FastTokenizer
from invrl.gateway.turns.matching.forest import Forest, Match
from invrl.gateway.turns.placement import ContextExceeded, Placer
from invrl.gateway.turns.prompt_threads import LARGE_REQUEST, PromptThreads
from invrl.gateway.turns.turns import Turns
from invrl.gateway.types import Message, Prompt, Tool
from invrl.types.sessions import Sampling

LARGE = "word " * 10_000


def test_a_reply_ends_before_the_tokens_that_the_engine_keeps(renderer: Renderer):
    placer = Placer(renderer, 100)
    sampling = Sampling(temperature=1.0, max_new_tokens=64)
    assert placer.limit_new_tokens(sampling, prompt_tokens=28).max_new_tokens == 64
    assert placer.limit_new_tokens(sampling, prompt_tokens=80).max_new_tokens == 12
    with pytest.raises(ContextExceeded):
        placer.limit_new_tokens(sampling, prompt_tokens=92)


@pytest.mark.parametrize("path", first_quick(["/chat/completions", "/completions"]))
async def test_other_requests_are_served_while_a_large_prompt_is_tokenised(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
):
    encode = FastTokenizer.encode
    begun = threading.Event()
    may_end = threading.Event()
    threads: list[threading.Thread] = []

    def slow(self: FastTokenizer, text: str, **options) -> list[int]:
        if len(text) >= len(LARGE):
            threads.append(threading.current_thread())
            begun.set()
            assert may_end.wait(60)
        return encode(self, text, **options)

    monkeypatch.setattr(FastTokenizer, "encode", slow)
    async with running(tmp_path, model, renderer, context_length=60_000) as gateway:
        [session, other] = await gateway.open(members=2)
        first = (
            await gateway.http.post(
                f"{session.base_url}/chat/completions", json=body(ASK)
            )
        ).json()
        history = [ASK, first["choices"][0]["message"]]
        large = {"role": "user", "content": LARGE}
        asked = (
            body(*history, large)
            if path == "/chat/completions"
            else {"model": "tiny", "prompt": LARGE}
        )
        call = asyncio.create_task(
            gateway.http.post(session.base_url + path, json=asked)
        )
        await eventually(begun.is_set)
        assert (await gateway.http.get(gateway.url + "/health")).status_code == 200
        answer = await gateway.http.post(
            f"{other.base_url}/chat/completions", json=body(MORE)
        )
        assert answer.status_code == 200
        assert not call.done()
        may_end.set()
        assert (await call).status_code == 200
        assert len(threads) == 1  # the text was tokenised once
        assert threads[0] is not threading.main_thread()
        sent = gateway.engine.requests[-1]["input_ids"]
        assert renderer.decode(sent).count("word ") == 10_000
        if path == "/chat/completions":
            assert gateway.turns(session)[1].parent_id == gateway.turns(session)[0].id


def test_ids_of_a_large_text_equal_those_of_its_tokenizer(renderer: Renderer):
    def whole(text: str) -> Sequence[int]:
        return renderer._tokenizer._tokenizer._backend.encode(
            text, add_special_tokens=False
        ).ids  # type: ignore[attr-defined]

    for text in (LARGE, "<|im_start|>user\n" + LARGE + "ünï 🙂<|im_end|>"):
        assert renderer.encode(text) == whole(text)


def body(*messages: object) -> dict[str, object]:
    return {"model": "tiny", "messages": list(messages), "max_tokens": 20}


def call(arguments: str) -> dict[str, object]:
    tool_call = {
        "id": "call-1",
        "type": "function",
        "function": {"name": "a", "arguments": arguments},
    }
    return {"role": "assistant", "content": "", "tool_calls": [tool_call]}


def tool(number: int, parameters: object) -> dict[str, object]:
    return {
        "type": "function",
        "function": {"name": f"tool{number}", "parameters": parameters},
    }


USER = {"role": "user", "content": "x"}
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": "y"}
NESTED = "[" * 100_000 + "]" * 100_000
MANY = {
    f"p{number}": {"type": "string", "description": "of no use"}
    for number in range(6_000)
}
HOSTILE: dict[str, tuple[object, str | None]] = {
    "letters": (
        body({"role": "user", "content": "word " * 200_000}),
        "context_length_exceeded",
    ),
    "spaces": (
        body({"role": "user", "content": " \n" * 200_000}),
        "context_length_exceeded",
    ),
    "messages": (
        body(*[USER, {"role": "assistant", "content": "z"}] * 4_000, USER),
        "context_length_exceeded",
    ),
    "one reply in pieces": (
        body(USER, *[call("{}")] * 2_000, RESULT),
        "context_length_exceeded",
    ),
    "reasoning": (
        body(
            USER,
            {
                "role": "assistant",
                "content": "z",
                "reasoning_content": "a b " * 100_000,
            },
            USER,
        ),
        None,
    ),
    "nested arguments": (body(USER, call(NESTED), RESULT), "invalid_messages"),
    "long arguments": (
        body(USER, call(json.dumps({"a": [1] * 200_000})), RESULT),
        "context_length_exceeded",
    ),
    "values in arguments": (
        body(USER, call("[" + "[]," * 600_000 + "0]"), RESULT),
        "too_many_values",
    ),
    "values": ({**body(USER), "metadata": [[]] * 600_000}, "too_many_values"),
    "nested": (
        '{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "metadata": '
        + NESTED
        + "}",
        "invalid_request",
    ),
    "names": (
        {**body(USER), **{f"name{number}": 1 for number in range(20_000)}},
        "too_many_fields",
    ),
    "tools": (
        {**body(USER), "tools": [tool(n, {}) for n in range(5_000)]},
        "invalid_request",
    ),
    "schema": (
        {**body(USER), "tools": [tool(0, {"properties": MANY})]},
        "schema_too_long",
    ),
    "schemas": (
        {
            **body(USER),
            "tools": [
                tool(n, {"properties": {f"q{n}": {"a": "b " * 1_000}}})
                for n in range(99)
            ],
        },
        "unsupported_parameter",
    ),
}
"""Requests that take long to read, to match, to render or to refuse, and the code of
the refusal."""


@pytest.mark.parametrize(
    "name", named_quick(HOSTILE.keys(), "values", "nested", "schemas")
)
async def test_large_requests_are_processed_outside_of_the_event_loop(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
):
    """Whatever it holds: it is parsed, matched, rendered and tokenised in another
    thread, and not again."""
    asked, refusal = HOSTILE[name]
    raw = (asked if isinstance(asked, str) else json.dumps(asked)).encode()
    parts = [
        (ChatDialect, "parse"),
        (Forest, "match"),
        (Renderer, "text"),
        (Renderer, "encode"),
        (Turns, "_constraint"),
        (Placer, "place"),
    ]
    done: list[tuple[str, threading.Thread]] = []
    for owner, part in parts:
        monkeypatch.setattr(owner, part, recorded(getattr(owner, part), part, done))
    async with running(tmp_path, model, renderer) as gateway:
        [session] = await gateway.open()
        url = session.base_url + "/chat/completions"
        first = await gateway.http.post(url, json=body(USER))
        assert first.status_code == 200
        assert {thread for _, thread in done} == {threading.main_thread()}, (
            "a small one is not sent away"
        )
        done.clear()
        answer = await gateway.http.post(url, content=raw)
        if refusal is None:
            assert answer.status_code == 200
        else:
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == refusal
        assert done[0][0] == "parse"
        assert threading.main_thread() not in {thread for _, thread in done}
        assert [part for part, _ in done].count("place") <= 1
        assert len(gateway.turns(session)) == (2 if refusal is None else 1)


def recorded(
    work: Callable[..., object], name: str, done: list[tuple[str, threading.Thread]]
):
    def recording(*args: object, **options: object) -> object:
        done.append((name, threading.current_thread()))
        return work(*args, **options)

    return recording


@pytest.mark.parametrize("stream", first_quick([False, True]))
async def test_a_large_text_is_refused_before_it_is_tokenised(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
):
    def never(self: FastTokenizer, text: str, **options) -> list[int]:
        assert len(text) < 32_768, "the text was tokenised"
        return encode(self, text, **options)

    encode = FastTokenizer.encode
    monkeypatch.setattr(FastTokenizer, "encode", never)
    async with running(tmp_path, model, renderer) as gateway:
        [session] = await gateway.open()
        asked = {**body({"role": "user", "content": LARGE}), "stream": stream}
        for path, prompt in (
            ("/chat/completions", asked),
            ("/completions", {"model": "tiny", "prompt": LARGE}),
        ):
            answer = await gateway.http.post(session.base_url + path, json=prompt)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert error["param"] == "messages"
            assert "maximum context length is 1024 tokens" in error["message"]
            least = int(error["message"].split("at least ")[1].split(" ")[0])
            text = "<|im_start|>user\n" + LARGE if "chat" in path else LARGE
            assert (
                1024
                < least
                <= len(renderer._tokenizer._tokenizer._backend.encode(text).ids) + 20
            )  # type: ignore[attr-defined]


async def test_tokens_of_a_large_prompt_are_counted_exactly(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
):
    """Also where the context has no room for them."""
    counted = []
    for context_length in (1024, 1_000_000):
        folder = tmp_path / str(context_length)
        folder.mkdir()
        async with running(
            folder, model, renderer, context_length=context_length
        ) as gateway:
            [session] = await gateway.open()
            asked = body({"role": "user", "content": LARGE})
            answer = await gateway.http.post(
                session.base_url + "/messages/count_tokens", json=asked
            )
            counted.append(answer.json()["input_tokens"])
    assert counted[0] == counted[1]
    prompt = Prompt(messages=(Message("user", LARGE),))
    assert counted[0] == len(renderer.encode(renderer.text(prompt)))


async def test_requests_wait_for_a_large_request_of_their_own_session_only(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
    monkeypatch: pytest.MonkeyPatch,
):
    """A forest is matched by one request at a time, whatever becomes of its client."""
    match = Forest.match
    begun = threading.Event()
    may_end = threading.Event()
    matching: list[Forest] = []

    def slow(
        self: Forest, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> Match:
        assert self not in matching
        matching.append(self)
        if sum(len(message.content) for message in messages) >= len(LARGE):
            begun.set()
            assert may_end.wait(60)
        result = match(self, messages, tools)
        matching.remove(self)
        return result

    monkeypatch.setattr(Forest, "match", slow)
    async with running(tmp_path, model, renderer, context_length=60_000) as gateway:
        [session, other] = await gateway.open(members=2)
        url = session.base_url + "/chat/completions"
        large = body({"role": "user", "content": LARGE})
        leaving = asyncio.create_task(gateway.http.post(url, json=large))
        await eventually(begun.is_set)
        leaving.cancel()
        small = asyncio.create_task(gateway.http.post(url, json=body(ASK)))
        answer = await gateway.http.post(
            other.base_url + "/chat/completions", json=body(MORE)
        )
        assert answer.status_code == 200
        assert not small.done()
        may_end.set()
        assert (await small).status_code == 200
        assert len(gateway.turns(session)) == 1, (
            "nothing is sampled for a client that left"
        )


async def test_cancelled_request_is_not_processed():
    threads = PromptThreads()
    begun = threading.Event()
    may_end = threading.Event()
    done: list[int] = []

    def block() -> None:
        begun.set()
        assert may_end.wait(60)

    first = asyncio.create_task(threads.run(block, size=LARGE_REQUEST))
    await eventually(begun.is_set)
    given_up = asyncio.create_task(
        threads.run(lambda: done.append(1), size=LARGE_REQUEST)
    )
    waited_for = asyncio.create_task(
        threads.run(lambda: done.append(2), size=LARGE_REQUEST)
    )
    await asyncio.sleep(0)
    given_up.cancel()
    huge = await threads.run(lambda: "not behind a usual one", size=2**24)
    assert huge == "not behind a usual one"
    may_end.set()
    await asyncio.gather(first, waited_for)
    assert done == [2]


def test_first_prompts_are_bounded_by_their_characters():
    prompts = PromptCache()
    asked = [
        Prompt(messages=(Message("user", f"{number} " + "x" * 900_000),))
        for number in range(9)
    ]
    for prompt in asked:
        prompts.put(prompt, [1, 2, 3])
    assert [prompts.get(prompt) for prompt in asked] == [None] * 5 + [[1, 2, 3]] * 4
    prompts.put(Prompt(messages=(Message("user", "x" * 2_000_000),)), [1])
    assert prompts.get(Prompt(messages=(Message("user", "x" * 2_000_000),))) is None
    assert prompts.get(asked[-1]) == [1, 2, 3]
    hidden = Prompt(messages=(Message("assistant", reasoning="x" * 2_000_000),))
    prompts.put(hidden, [1])
    assert prompts.get(hidden) is None
