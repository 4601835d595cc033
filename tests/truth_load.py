"""Many conversations at once, as real agents have them, with what went out and what
came back kept.

Each session talks for some turns, whole or streamed. On the way it edits its history,
asks in parallel branches, repeats a request (after the answer or beside it), cancels a
stream, asks something auxiliary, wants two answers, sends replies back re-formatted,
runs out of tokens, or uses a stop string. A pure function of its seed, but for what is
decided by time. Tools are used if `tools`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from token_truth import Sent
from truth_stack import MODEL_NAME, Stack

_WORDS = (
    "ünïcödé 🙂 sum total 12*13 maybe \n\n naïve 数字 four 3.14 end? <b> {x} the".split(
        " "
    )
)
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates one arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "such as 12*13"}
            },
            "required": ["expression"],
        },
    },
}


def chatter(prompt: str) -> str:
    """A script: words, digits and unicode; calls, at times with text behind them, if
    asked for a number with tools shown."""
    source = random.Random(prompt)
    words = [source.choice(_WORDS) for _ in range(source.randint(1, 14))]
    text = source.choice(["", " ", "\n"]) * (source.random() < 0.2) + " ".join(words)
    last = prompt.rpartition("<|im_start|>user")[2]
    if (
        '"calculator"' in prompt
        and "number please" in last
        and "<|im_start|>tool" not in last
    ):
        calls = [
            f"{source.randint(1, 99)}*{source.randint(1, 99)}"
            for _ in range(source.choice([1, 1, 2]))
        ]
        arguments = [
            json.dumps({"name": "calculator", "arguments": {"expression": call}})
            for call in calls
        ]
        behind = source.choice(["", "", "", "\n\nDone: 漢字", " and more"])
        text = "\n".join(
            [
                text.strip(),
                *(
                    f"<tool_call>\n{argument}\n</tool_call>{behind}"
                    for argument in arguments
                ),
            ]
        )
        text = text.strip()
    return text


def thoughtful(prompt: str) -> str:
    """As `chatter`, most replies with thinking before them, unless the prompt refuses
    it."""
    source = random.Random(prompt + "?")
    text = chatter(prompt).strip()
    if prompt.endswith("</think>\n\n") or source.random() < 0.2:
        return text
    words = [source.choice(_WORDS) for _ in range(source.randint(0, 10))]
    return f"<think>\n{' '.join(words).strip()}\n</think>\n\n{text}"


@dataclass(slots=True, kw_only=True, eq=False)
class Load:
    """`run` talks until at least `turns` answers were asked for."""

    stack: Stack
    turns: int
    seed: int = 0
    at_once: int = 24
    session_turns: int = 8
    tools: bool = False
    forced: bool = False
    """Some requests with tools force a call."""
    thinking: bool = False
    """The model thinks: some sessions send thinking back, some do not, some refuse it
    in every request."""
    max_tokens: int | None = None
    """Of each request; None: a small one now and then."""
    sent: list[Sent] = field(default_factory=list)
    did: Counter[str] = field(default_factory=Counter)
    sessions: list[dict] = field(default_factory=list)
    unthinking: set[str] = field(default_factory=set)
    """Sessions that refuse thinking."""
    errors: list[str] = field(default_factory=list)

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        async with aiohttp.ClientSession(connector=connector) as http:
            numbers = iter(range(10**9))

            async def worker() -> None:
                while self.did["asked"] < self.turns:
                    await _Talk(self, http, next(numbers)).run()

            await asyncio.gather(*(worker() for _ in range(self.at_once)))


class _Talk:
    """One session."""

    def __init__(self, load: Load, http: aiohttp.ClientSession, number: int) -> None:
        self.load = load
        self.http = http
        self.number = number
        self.random = random.Random(f"{load.seed}/{number}")
        self.tools = [CALCULATOR] if load.tools and number % 2 else []
        self.messages: list[dict] = []
        self.trims = False
        self.refuses_thinking = load.thinking and number % 5 == 3
        self.returns_thinking = load.thinking and number % 2 == 0

    async def run(self) -> None:
        self.session = await self.load.stack.open(group=f"g{self.number}")
        self.load.sessions.append(self.session)
        if self.refuses_thinking:
            self.load.unthinking.add(self.session["id"])
        if self.random.random() < 0.7:
            self.messages.append(
                {"role": "system", "content": f"You are agent {self.number}. Be brief."}
            )
        steps: list[Callable[[], Coroutine[Any, Any, None]]] = [
            *[self.plain] * 6, self.edited, self.branches, self.repeated, self.joined, self.cancelled,
            self.aside, self.several, self.reformatted,
        ]  # fmt: skip
        for _ in range(self.load.session_turns):
            self.messages.append(self._question())
            step = self.random.choice(steps)
            self.load.did[step.__name__] += 1
            await step()
        await self.load.stack.finish(self.session)

    async def plain(self) -> None:
        await self._answered(await self.ask(self.messages))

    async def edited(self) -> None:
        """Another text where a reply was, or where a question was. Not beside calls:
        whatever stands there, a reply is known by its calls."""
        self.messages = [dict(message) for message in self.messages]
        texts = [
            message
            for message in self.messages[:-1]
            if message["role"] != "system" and message.get("content")
        ]
        spots = [text for text in texts if not text.get("tool_calls")]
        if spots:
            self.random.choice(spots)["content"] = (
                f"edited {self.random.randrange(1000)}"
            )
        await self.plain()

    async def branches(self) -> None:
        """Several requests at once from the same history; the last one is continued."""
        asked = [[*self.messages[:-1], self._question()] for _ in range(3)]
        answers = await asyncio.gather(*(self.ask(messages) for messages in asked))
        self.messages = asked[-1]
        await self._answered(answers[-1])

    async def repeated(self) -> None:
        body = self._body(self.messages)
        first = await self.send(body)
        second = await self.send(body, {"x-stainless-retry-count": "1"})
        if first is None or second is None or first[0] != second[0]:
            self.load.errors.append(
                f"session {self.number}: a retry was answered by another turn"
            )
        await self._answered(first)

    async def joined(self) -> None:
        body = self._body(self.messages)
        answers = await asyncio.gather(
            self.send(body), self.send(body, {"x-stainless-retry-count": "1"})
        )
        await self._answered(answers[0])

    async def cancelled(self) -> None:
        await self.send(
            self._body(self.messages, stream=True), cut_after=self.random.randint(0, 6)
        )
        await self.plain()

    async def aside(self) -> None:
        await self.ask(
            [
                {
                    "role": "user",
                    "content": f"A title for talk {self.random.randrange(100)}",
                }
            ]
        )
        await self.plain()

    async def several(self) -> None:
        """Two answers to one request; the first one is continued."""
        await self._answered(await self.send({**self._body(self.messages), "n": 2}))

    async def reformatted(self) -> None:
        """From here on replies go back trimmed, their calls' arguments laid out
        otherwise."""
        self.trims = True
        await self.plain()

    async def ask(self, messages: list[dict]) -> tuple[str, dict] | None:
        return await self.send(self._body(messages))

    async def _answered(self, answer: tuple[str, dict] | None) -> None:
        """The reply joins the history; calls are answered, and the answers are asked
        about."""
        if answer is None:
            return
        message = answer[1]
        self.messages = [*self.messages, message]
        if message.get("tool_calls"):
            self.load.did["tool_turns"] += 1
            for call in message["tool_calls"]:
                result = {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": _evaluate(call),
                }
                self.messages.append(result)
            self.messages.append({"role": "user", "content": "go on"})
            again = await self.ask(self.messages)
            if again is not None:
                self.messages = [*self.messages, again[1]]

    def _question(self) -> dict:
        words = [self.random.choice(_WORDS) for _ in range(self.random.randint(1, 8))]
        if self.tools and self.random.random() < 0.5:
            words.append("number please")
        return {
            "role": "user",
            "content": " ".join(words) + f" #{self.random.randrange(10**6)}",
        }

    def _body(self, messages: list[dict], *, stream: bool | None = None) -> dict:
        shown = [
            _trimmed(message) if self.trims else dict(message) for message in messages
        ]
        body: dict = {"model": MODEL_NAME, "messages": shown}
        body["stream"] = self.random.random() < 0.5 if stream is None else stream
        if self.load.max_tokens:
            body["max_tokens"] = self.load.max_tokens
        elif self.random.random() < 0.15:
            body["max_tokens"] = self.random.randint(1, 12)
        if self.random.random() < 0.1:
            body["stop"] = [self.random.choice(["e", "13", "ü"])]
        if self.refuses_thinking:
            body["chat_template_kwargs"] = {"enable_thinking": False}
        if self.tools:
            body["tools"] = self.tools
            if self.load.forced and self.random.random() < 0.3:
                body["tool_choice"] = "required"
        return body

    async def send(
        self,
        body: dict,
        headers: Mapping[str, str] | None = None,
        *,
        cut_after: int | None = None,
    ) -> tuple[str, dict] | None:
        """(turn, reply message) of a whole answer; None where the stream was cut off or
        failed."""
        load = self.load
        load.did["asked"] += 1
        load.did["streamed"] += bool(body["stream"])
        load.did["forced"] += "tool_choice" in body
        given = {"authorization": f"Bearer {self.session['key']}", **(headers or {})}
        url = self.session["base_url"] + "/chat/completions"
        async with self.http.post(url, json=body, headers=given) as answer:
            if answer.status != 200:
                load.errors.append(f"{answer.status}: {(await answer.text())[:300]}")
                return None
            rid = answer.headers["x-request-id"]
            if body["stream"]:
                message = await _streamed(answer, cut_after)
            else:
                message = (await answer.json())["choices"][0]["message"]
        if message is None:
            load.did["cut"] += 1
            return None
        reasoning = message.get("reasoning_content") or ""
        names = [
            "role",
            "content",
            "tool_calls",
            *(["reasoning_content"] if self.returns_thinking else []),
        ]
        message = {name: message[name] for name in names if message.get(name)}
        text = message.get("content", "")
        calls = message.get("tool_calls", [])
        tools = body.get("tools", [])
        messages = body["messages"]
        sent = Sent(
            turn_id=rid, messages=messages, tools=tools, text=text, tool_calls=calls
        )
        sent = dataclasses.replace(sent, reasoning=reasoning)
        load.sent.append(dataclasses.replace(sent, trimmed=self.trims))
        return rid, {"content": "", **message, "role": "assistant"}


async def _streamed(
    answer: aiohttp.ClientResponse, cut_after: int | None
) -> dict | None:
    """The message that the chunks add up to; None if it was left after `cut_after`
    events."""
    message: dict = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "",
        "tool_calls": [],
    }
    done = False
    seen = 0
    async for line in answer.content:
        if cut_after is not None and seen >= cut_after:
            answer.close()
            return None
        if not line.startswith(b"data: "):
            continue
        seen += 1
        if line.startswith(b"data: [DONE]"):
            done = True
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(f"the stream ended with {event}")
        for choice in event["choices"]:
            if choice["index"]:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(
                        {**call, "function": {**call["function"]}}
                    )
                else:
                    message["tool_calls"][call["index"]]["function"]["arguments"] += (
                        call["function"]["arguments"]
                    )
    assert done, "the stream ended without [DONE]"
    for call in message["tool_calls"]:
        call.pop("index", None)
    return message


def _trimmed(message: Mapping) -> dict:
    """Without whitespace around; arguments in another layout."""
    if message["role"] != "assistant":
        return dict(message)
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": _laid_out(call["function"]["arguments"]),
            },
        }
        for call in message.get("tool_calls", [])
    ]
    more = {"tool_calls": calls} if calls else {}
    return {**message, "content": (message.get("content") or "").strip(), **more}


def _laid_out(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), indent=1)
    except ValueError:
        return arguments


def _evaluate(call: Mapping) -> str:
    try:
        left, right = json.loads(call["function"]["arguments"])["expression"].split("*")
        return str(int(left) * int(right))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"error: {error!r}"
