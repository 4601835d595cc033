"""Stand-ins for what is slow to start. Each passes the same contract tests as the real
thing.

`FakeEngine` is an HTTP server that speaks SGLang's `/generate` as the gateway uses it:
ids in; ids, log-probs, version spans and cache counts out, streamed incrementally and in
events of as many tokens as a label says, as our engines do. Every event has the version
spans of all tokens so far, as our engines' events do.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from invrl.engines.inside_sglang.request_labels import (
    EXPERTS_LABEL,
    INTERVAL_LABEL,
)

Script = Callable[[Sequence[int]], Sequence[int]]
"""Prompt ids to reply ids; a reply ends where the script ends it, at a stop token or
out of tokens."""


def reply_by_prompt(*, tokens: int) -> Script:
    """Always the same tokens to the same prompt: what greedy sampling is."""

    def reply(prompt: Sequence[int]) -> list[int]:
        source = random.Random(str(list(prompt)))
        return [source.randrange(10, 300) for _ in range(tokens)]

    return reply


def chained_reply(*, end: int = 2) -> Script:
    """About forty tokens, each decided by the ids before it, then the end token: a
    reply that is continued from any of its tokens becomes the same reply."""

    def reply(prompt: Sequence[int]) -> list[int]:
        ids = list(prompt)
        while ids[-1] != end or len(ids) == len(prompt):
            number = zlib.crc32(np.array(ids[-20:], np.int32).tobytes())
            ids.append(end if number % 40 == 0 else 10 + number % 290)
        return ids[len(prompt) :]

    return reply


def random_reply(
    *, seed: int = 0, tokens: int = 12, vocab: tuple[int, int] = (10, 300), end: int = 2
) -> Script:
    """Random tokens, then the end token."""
    source = random.Random(seed)

    def reply(_: Sequence[int]) -> list[int]:
        return [source.randrange(*vocab) for _ in range(tokens)] + [end]

    return reply


def fake_experts(ids: Sequence[int]) -> NDArray[np.int32]:
    """[T, 3, 2], of 8: those of a token depend on it, on all before it, and on the
    layer."""
    sums = np.cumsum(np.asarray(ids, np.int64) * np.arange(1, len(ids) + 1))
    first_TL = (sums[:, None] // np.array([1, 3, 7])) % 8
    return np.stack([first_TL, (first_TL + 1 + sums[:, None] % 7) % 8], -1).astype(
        np.int32
    )


class FakeEngine:
    """Use as an async context manager; `url` is where it listens."""

    def __init__(
        self, script: Script, *, version: int = 0, token_delay_s: float = 0.0
    ) -> None:
        self.script = script
        self.version = version
        self.token_delay_s = token_delay_s
        self.holds: Callable[[int], bool] = lambda _: False
        """Whether a reply waits before its n-th token (from 1); asked again until it
        need not."""
        self.drop_connections = 0
        """So many requests are cut off before an answer."""
        self.aborts = 0
        """So many requests are aborted at their first token."""
        self.spoil: Callable[[dict], object] = lambda event: event
        """Changes the event that ends an answer, or returns another one."""
        self.headers: dict[str, str] = {}
        """Added to those of each answer."""
        self.prompt_tokens_added = 0
        """By which it miscounts the tokens of each prompt."""
        self.requests: list[dict] = []
        self.traceparents: list[str] = []
        """The header of each request."""
        self.replies: dict[str, list[int]] = {}
        """What each request was answered with, whole."""
        self.sent: list[tuple[int, int]] = []
        """Each token that left the engine, with its version, in all requests."""
        self.cancelled: list[str] = []
        self.running: set[str] = set()
        self.url = ""
        self._cache: list[list[int]] = []
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> FakeEngine:
        app = web.Application(client_max_size=2**28)
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/generate", self._generate), web.get("/health", self._health)]

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.traceparents.append(request.headers.get("traceparent", ""))
        if self.drop_connections:
            self.drop_connections -= 1
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        self.running.add(body["rid"])
        try:
            return await self._answer(request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled.append(body["rid"])
            raise
        finally:
            self.running.discard(body["rid"])

    async def _answer(self, request: web.Request, body: dict) -> web.StreamResponse:
        prompt = body["input_ids"]
        params = body["sampling_params"]
        labels = body.get("custom_labels") or {}
        interval = int(labels.get(INTERVAL_LABEL, 1))
        reply, finish = self._reply(prompt, params)
        self.replies[body["rid"]] = reply
        cached = max((_common(prompt, seen) for seen in self._cache), default=0)
        cached = min(cached, len(prompt) - 1)
        versions: list[int] = []
        num_sent = 0
        headers = {"Content-Type": "text/event-stream", **self.headers}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for count in range(1, len(reply) + 1):
            if self.token_delay_s:
                await asyncio.sleep(self.token_delay_s)
            while self.holds(count):
                await asyncio.sleep(0.001)
            versions.append(self.version)
            is_last = count == len(reply)
            if not is_last and interval > 1 and count % interval != 1:
                continue
            ids = reply[num_sent:count]
            out: dict = {
                "text": "",
                "output_ids": ids,
                "meta_info": {
                    "id": body["rid"],
                    "finish_reason": finish if is_last else None,
                    "prompt_tokens": len(prompt) + self.prompt_tokens_added,
                    "completion_tokens": count,
                    "cached_tokens": cached,
                    "weight_version": str(self.version),
                    "weight_versions": _version_spans(versions),
                    "output_token_logprobs": [
                        [fake_logprob(token), token, None] for token in ids
                    ],
                },
            }
            if is_last and EXPERTS_LABEL in labels:
                first = int(labels[EXPERTS_LABEL])
                experts = fake_experts([*prompt, *reply])[first:-1]
                out["meta_info"]["routed_experts"] = base64.b64encode(
                    experts.tobytes()
                ).decode()
            if top := body.get("top_logprobs_num"):
                out["meta_info"]["output_top_logprobs"] = [
                    [
                        [fake_logprob(token) - rank / 2, (token + rank) % 512, None]
                        for rank in range(top)
                    ]
                    for token in ids
                ]
            if is_last:
                out = self.spoil(out)
            await response.write(b"data: " + json.dumps(out).encode() + b"\n\n")
            self.sent += zip(ids, versions[num_sent:], strict=True)
            num_sent = count
        self._cache = [*self._cache[-63:], [*prompt, *reply]]
        with contextlib.suppress(ConnectionResetError):
            await response.write(b"data: [DONE]\n\n")
        return response

    def _reply(self, prompt: Sequence[int], params: dict) -> tuple[list[int], dict]:
        reply = list(self.script(prompt))
        if self.aborts:
            self.aborts -= 1
            return reply[:1], {"type": "abort", "message": "told to"}
        limit = params["max_new_tokens"]
        for count, token in enumerate(reply[:limit], 1):
            if token in params["stop_token_ids"] and not params.get("ignore_eos"):
                return reply[:count], {"type": "stop", "matched": token}
        return reply[:limit], {"type": "length", "length": limit}


class EngineDeaths:
    """An engine dies before tokens of its requests, and one with the next weight
    version takes its place. Use it as the engine's `holds`."""

    def __init__(self, engine: FakeEngine, *before: int) -> None:
        """`before`: for each death the number of the token that is not sent, from 1. A
        request that a death does not end is followed by one with the same number."""
        self._engine = engine
        self._before = list(before)

    def __call__(self, count: int) -> bool:
        if self._before and count >= self._before[0]:
            del self._before[0]
            self._engine.version += 1
            raise ConnectionResetError("the engine died")
        return False


def fake_logprob(token: int) -> float:
    """The log-prob that the fake gives a token."""
    return -(token % 97) / 97 - 0.01


def _version_spans(versions: Sequence[int]) -> list[dict]:
    """As SGLang reports the version of each token."""
    spans: list[dict] = []
    for position, version in enumerate(versions):
        if not spans or spans[-1]["version"] != str(version):
            spans.append({"version": str(version), "start": position})
        spans[-1]["end"] = position + 1
    return spans


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
