"""The load generator: conversations, through a gateway or straight at the engine,
closed or open loop.

Both ways carry the same: the prompt of a turn at the engine is the one that the gateway
made of it, and an answer has the same tokens. The stand-in's replies are known: a next
turn needs no look at the answer before.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import aiohttp
import numpy as np
import orjson

from invrl.errors import ServerError
from invrl.rollout.workers.session_client import SessionClient
from invrl.store.run_store import RunStore
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.reasons import FailureReason
from invrl.types.sessions import Sampling, Session
from invrl.types.tasks import Task

Message = dict[str, str]
_SYSTEM = (
    "You are a careful assistant that helps with arithmetic and with plans. Think about what was asked, use "
    "the calculator for every product of two numbers, say which steps you took and in which order, and end "
    "with the answer alone on a line of its own. If something is missing, ask for it once; never invent it. "
)
_ASK = "Question {at}: a shop sells {at} boxes with 12 apples each; how many apples is that, and why?"
_GROUP = 8
"""Sessions of one prompt, as a group's members are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Script:
    """One conversation, the same in all sessions: requests by turn, for both ways."""

    tokens: int
    """Of each answer."""
    chat: Sequence[Sequence[Message]]
    prompts: Sequence[Sequence[int]]
    """As the gateway sends them."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """Times in seconds; of an answer, from when its request was due."""

    seconds: float = 0.0
    tokens: int = 0
    whole_s: list[float] = field(default_factory=list)
    """To the last byte."""
    first_s: list[float] = field(default_factory=list)
    """To the first byte of the body."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """By process, while this was measured."""
    errors: list[str] = field(default_factory=list)

    def percentile_ms(self, what: str, rank: int) -> float:
        """`what`: "whole" or "first"."""
        return 1000 * float(
            np.percentile(self.whole_s if what == "whole" else self.first_s, rank)
        )


Ask = Callable[[int, int], Awaitable[float]]
"""Agent and turn -> when the first byte of the body came. Raises what went wrong."""


class Load:
    """Connections of its own to everything it loads."""

    def __init__(self, *, env_key: str, engine_url: str) -> None:
        self._env_key, self._engine_url = env_key, engine_url
        # Kept for less than any server keeps it.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        self._http = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=300.0)
        )

    async def close(self) -> None:
        await self._http.close()

    async def open(self, gateway_url: str, count: int) -> list[Session]:
        """Sessions as training opens them."""
        client = SessionClient(gateway_url, env_key=self._env_key)
        sessions: list[Session] = []
        for start in range(0, count, 1000):
            members = tuple(
                GroupMember(index=at, attempt=0)
                for at in range(min(1000, count - start))
            )
            lease = GroupLease(
                group_id=uuid4().hex, task=Task(id="bench", payload={}), members=members
            )
            sessions += await client.open(
                lease, purpose="train", sampling=Sampling(max_new_tokens=1024)
            )
        await client.close()
        return sessions

    async def end(self, gateway_url: str, sessions: Sequence[Session]) -> None:
        client = SessionClient(gateway_url, env_key=self._env_key)
        for session in sessions:
            await client.abort(session, FailureReason.ABORTED, "measured")
        await client.close()

    async def script(
        self, gateway_url: str, store_path: Path, *, turns: int, tokens: int
    ) -> Script:
        """Made by one session that has this conversation; its prompts are those that
        the gateway recorded."""
        [session] = await self.open(gateway_url, 1)
        headers = {"authorization": f"Bearer {session.key}"}
        messages: list[Message] = [{"role": "system", "content": _SYSTEM}]
        chat = []
        for at in range(turns):
            messages = [*messages, {"role": "user", "content": _ASK.format(at=at + 7)}]
            chat.append(messages)
            body = {"model": "bench", "max_tokens": tokens, "messages": messages}
            async with self._http.post(
                f"{session.base_url}/chat/completions", json=body, headers=headers
            ) as answer:
                answer.raise_for_status()
                message = (await answer.json())["choices"][0]["message"]
            messages = [*messages, {"role": "assistant", "content": message["content"]}]
        await self.end(gateway_url, [session])
        with contextlib.closing(RunStore(store_path)) as store:
            prompts = []
            ids = list[int]()
            for turn in store.turns(session.id):
                assert turn.parent_id is not None or not prompts, "a turn forked"
                prompts.append(ids := [*ids, *turn.context_ids_T.tolist()])
                ids = [*ids, *turn.sampled_ids_T.tolist()]
        return Script(tokens=tokens, chat=chat, prompts=prompts)

    def through(
        self, script: Script, sessions: Sequence[Session], *, stream: bool
    ) -> Ask:
        """Chat requests, as an agent sends them; each group of sessions asks something
        of its own first."""
        shared = {"model": "bench", "max_tokens": script.tokens, "stream": stream}

        def body(group: int, messages: Sequence[Message]) -> bytes:
            system, question, *rest = messages
            question = {**question, "content": f"Task {group}. {question['content']}"}
            return orjson.dumps({**shared, "messages": [system, question, *rest]})

        groups = range(-(-len(sessions) // _GROUP))
        bodies = [
            [body(group, messages) for messages in script.chat] for group in groups
        ]

        async def ask(agent: int, turn: int) -> float:
            session = sessions[agent]
            headers = {
                "authorization": f"Bearer {session.key}",
                "content-type": "application/json",
            }
            url = f"{session.base_url}/chat/completions"
            return await self._post(url, bodies[agent // _GROUP][turn], headers, stream)

        return ask

    def direct(self, script: Script, *, stream: bool) -> Ask:
        """The same turns at the engine."""
        sampling = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": script.tokens}
        shared = {"sampling_params": sampling, "return_logprob": True, "stream": stream}
        bodies = [{**shared, "input_ids": list(ids)} for ids in script.prompts]

        async def ask(_: int, turn: int) -> float:
            body = orjson.dumps({"rid": uuid4().hex, **bodies[turn]})
            headers = {"content-type": "application/json"}
            return await self._post(
                self._engine_url + "/generate", body, headers, stream
            )

        return ask

    async def _post(
        self, url: str, body: bytes, headers: dict[str, str], stream: bool
    ) -> float:
        async with self._http.post(url, data=body, headers=headers) as answer:
            if answer.status != 200:
                raise ServerError(f"{answer.status}: {(await answer.text())[:300]}")
            if not stream:
                await answer.read()
                return time.perf_counter()
            first = 0.0
            last = b""
            async for data in answer.content.iter_any():
                first = first or time.perf_counter()
                last = (last + data)[-32:]
            if not last.endswith(b"data: [DONE]\n\n"):
                raise ServerError(f"the stream ended without its end: {last!r}")
            return first


async def closed_loop(
    ask: Ask, script: Script, *, agents: int, rounds: int = 1
) -> Measured:
    """Every agent asks its turns one after the other; `rounds`: conversations of an
    agent, a session each."""
    measured = Measured()

    async def converse(agent: int) -> None:
        for number in range(agent, agents * rounds, agents):
            for turn in range(len(script.chat)):
                due = time.perf_counter()
                if await _answered(ask, number, turn, due, measured):
                    measured.tokens += script.tokens

    started = time.perf_counter()
    await asyncio.gather(*(converse(agent) for agent in range(agents)))
    measured.seconds = time.perf_counter() - started
    return measured


def arrivals(*, rate: float, seconds: float, seed: int) -> list[float]:
    """A Poisson process: when each request is due, in seconds from the start."""
    source = random.Random(seed)
    at = 0.0
    times = []
    while (at := at + source.expovariate(rate)) < seconds:
        times.append(at)
    return times


async def open_loop(ask: Ask, script: Script, *, due_s: Sequence[float]) -> Measured:
    """Requests leave when they are due, whatever became of those before; a request that
    leaves late, because this process was late, has waited all the same. Consecutive
    turns of a session are `len(due_s) / turns` requests apart."""
    measured = Measured()
    turns = len(script.chat)
    sessions = -(-len(due_s) // turns)
    tasks = []
    started = time.perf_counter()
    for number, due in enumerate(due_s):
        wait = started + due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        turn, session = divmod(number, sessions)
        tasks.append(
            asyncio.create_task(_answered(ask, session, turn, started + due, measured))
        )
    await asyncio.gather(*tasks)
    measured.seconds = time.perf_counter() - started
    measured.tokens = script.tokens * len(measured.whole_s)
    return measured


async def _answered(
    ask: Ask, agent: int, turn: int, due: float, measured: Measured
) -> bool:
    try:
        first = await ask(agent, turn)
    except (ServerError, aiohttp.ClientError, TimeoutError) as error:
        measured.errors.append(repr(error))
        return False
    measured.first_s.append(first - due)
    measured.whole_s.append(time.perf_counter() - due)
    return True
