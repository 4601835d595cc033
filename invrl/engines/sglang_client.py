"""A typed async client of SGLang's native API: token ids in; ids, log-probs and version spans out.

Invariant: nothing leaves here that kills a server (an id outside the vocabulary does) or that it
would silently cut short; every call has a deadline. One instance speaks to one base URL: the router
(the gateway, with the engines' key) or one engine (the weight receiver and the health check, with
the admin key too). Used by the gateway, `weight_receiver`, `fleet` and `health`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from invrl.engines.http_connection import HttpConnection, HttpConnections, HttpError
from invrl.engines.version_spans import EngineSpan, VersionTracker
from invrl.errors import DeadlineError, ServerError, SessionError
from invrl.types import FinishReason, Json, Sampling, VersionSpan, WeightVersion

_CONTROL_DEADLINE_S = 60.0
NEUTRAL_SAMPLING: Mapping[str, Json] = {
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "stop_regex": None,
    "logit_bias": None,
    "custom_params": None,
    "beam_width": None,
}
"""Every parameter of SGLang's that changes what is sampled, at the value where it changes nothing. They stand
in each request: what a request leaves out, the server may fill in by itself."""
TOP = np.dtype([("id", np.int32), ("logprob", np.float32)])
"""A token that could have been sampled."""
NO_TOP: NDArray[np.void] = np.empty(0, TOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine can take: known from the model folder and the engine's settings."""

    vocab_size: int
    context_length: int
    """Prompt and answer together; the KV cache's size where that is smaller."""

    @classmethod
    def of(cls, model_path: Path | str, *, max_total_tokens: int) -> EngineLimits:
        config = json.loads((Path(model_path) / "config.json").read_text())
        positions = int(config.get("max_position_embeddings", max_total_tokens))
        # SGLang keeps a few KV slots for itself; a request that needs them all would wait for ever.
        return cls(vocab_size=int(config["vocab_size"]), context_length=min(positions, max_total_tokens - 64))


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One generation. `input_ids_T` is the whole prompt; `routing_key` keeps a session on one engine."""

    rid: str
    input_ids_T: NDArray[np.int32]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    extra_sampling: Mapping[str, Json] = msgspec.field(default_factory=dict)
    """Further SGLang sampling parameters by their own names (`top_k`, `json_schema`, ...)."""
    routing_key: str = ""
    top_logprobs: int = 0
    """So many of the likeliest tokens are wanted at each place."""


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The tokens that arrived since the chunk before."""

    ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    """Of the whole output so far: who cancels keeps what was sampled. Exact in the last chunk; before it
    they are what `VersionTracker` makes of the chunks' labels, never newer than the tokens' own versions."""
    cached_tokens: int = 0
    """Of the prompt: those that the engine had in its cache."""
    top: NDArray[np.void] = msgspec.field(default_factory=lambda: NO_TOP)
    """[T * top_logprobs]: of each token in turn the likeliest in its place, the likeliest first."""


class GenerateEnd(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A finished generation without its tokens."""

    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    matched_stop: int | str | None
    """The token id or the string that ended it."""
    prompt_tokens: int
    cached_tokens: int


class GenerateResult(GenerateEnd, frozen=True, kw_only=True, eq=False):
    """A finished generation, whole. An aborted one holds what was sampled before."""

    ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    top: NDArray[np.void] = msgspec.field(default_factory=lambda: NO_TOP)


class SglangClient:
    """Use inside one event loop; `async with`, or `close()` at the end."""

    def __init__(
        self,
        base_url: str,
        *,
        limits: EngineLimits,
        api_key: str = "",
        admin_key: str = "",
        name: str = "",
        generate_deadline_s: float = 3600.0,
    ) -> None:
        """`name` is how errors call the server."""
        self.base_url = base_url.rstrip("/")
        self.name = name or self.base_url
        self.limits = limits
        self._api_key, self._admin_key = api_key, admin_key
        self._generate_deadline_s = generate_deadline_s
        # Kept for less than the server's 5 s: it must not close one just as we write to it.
        self._http = HttpConnections(self.base_url, idle_s=2.0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._http.close()

    # ------------------------------------------------------------------ generation

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """One whole answer. Raises SessionError (400) for a request that must not be sent, ServerError,
        DeadlineError. Cancelling the call cancels the generation."""
        body, deadline_s = self._body(request, stream=False), self._generate_deadline_s
        answer = await self._ask("/generate", body, deadline_s=deadline_s, routing_key=request.routing_key)
        whole = (reader := _Reader(request)).add(_event(answer))
        end = msgspec.structs.asdict(reader.end())
        return GenerateResult(**end, ids_T=whole.ids_T, logprobs_T=whole.logprobs_T, top=whole.top)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk | GenerateEnd, None]:
        """Chunks of new tokens as they come; they are not kept here. The last item is the end. Errors as in
        `generate`. Closing the iterator drops the connection, which ends the generation within 0.1 s."""
        body = self._body(request, stream=True)
        reader = _Reader(request)
        try:
            async with asyncio.timeout(self._generate_deadline_s):
                opened = self._open("/generate", body, key=self._api_key, routing_key=request.routing_key)
                async with opened as response:
                    async for event in _events(response):
                        if len((chunk := reader.add(event)).ids_T):
                            yield chunk
        except TimeoutError:
            waited_for = f"{self.name} to finish generation {request.rid}"
            raise DeadlineError(waited_for, self._generate_deadline_s) from None
        yield reader.end()

    async def prompt_logprobs(
        self, prompts: Sequence[Sequence[int]], *, deadline_s: float = 120.0
    ) -> list[NDArray[np.float32]]:
        """Log-prob of each prompt's token t >= 1 given those before it, at temperature 1: [T-1] each."""
        for ids in prompts:
            self.validate(ids, 1)
        body: dict[str, Json] = {
            "input_ids": [list(map(int, ids)) for ids in prompts],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answers = orjson.loads(await self._ask("/generate", body, deadline_s=deadline_s))
        rows = [answer["meta_info"]["input_token_logprobs"][1:] for answer in answers]
        if [len(row) for row in rows] != [len(ids) - 1 for ids in prompts]:
            raise ServerError(f"{self.name}: prompt log-probs of other lengths than the prompts")
        return [np.array([entry[0] for entry in row], np.float32) for row in rows]

    def validate(self, input_ids: Sequence[int] | NDArray[np.int32], max_new_tokens: int) -> None:
        """SessionError (400) for what the engine would die of, refuse or cut short."""
        ids_T = np.asarray(input_ids, np.int64)
        if ids_T.size == 0:
            raise SessionError("the prompt is empty", status=400, code="empty_prompt")
        low, high = int(ids_T.min()), int(ids_T.max())
        if low < 0 or high >= self.limits.vocab_size:
            bad = low if low < 0 else high
            reason = f"token id {bad} is outside the vocabulary of {self.limits.vocab_size}"
            raise SessionError(reason, status=400, code="invalid_token_id")
        if max_new_tokens < 1:
            reason = f"max_new_tokens is {max_new_tokens}, at least 1 is needed"
            raise SessionError(reason, status=400, code="invalid_value")
        if len(ids_T) + max_new_tokens > (room := self.limits.context_length):
            reason = f"{len(ids_T)} prompt tokens and {max_new_tokens} new ones exceed the context of {room}"
            raise SessionError(reason, status=400, code="context_length_exceeded")

    # ------------------------------------------------------------------ control (an engine, not the router)

    async def pause(self) -> None:
        """Running requests are retracted: they go on after `resume`."""
        await self._control("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self._control("/continue_generation", {"torch_empty_cache": False})

    async def flush_cache(self, *, idle_within_s: float = 0.0) -> None:
        """Refused while a request runs, and for a moment after its answer: the engine may be given
        `idle_within_s` to come to rest. A paused one, whose requests wait, needs none."""
        await self._control(f"/flush_cache?timeout={idle_within_s:g}", {})

    async def begin_weight_update(self) -> None:
        await self._control("/begin_weight_update", {})

    async def end_weight_update(self) -> None:
        await self._control("/end_weight_update", {})

    async def update_weights_from_tensor(
        self, payloads: Sequence[str], *, load_format: str, deadline_s: float
    ) -> None:
        """`payloads`: one pickled value (base64) per tensor-parallel rank. Never sends a version: the
        server would take it even if the load failed (`set_weight_version` comes after the checks)."""
        body: dict[str, Json] = {"serialized_named_tensors": list(payloads), "load_format": load_format}
        body["flush_cache"] = False
        await self._control("/update_weights_from_tensor", body, deadline_s=deadline_s)

    async def set_weight_version(self, version: WeightVersion) -> None:
        """Name what is loaded; running requests go on (the server's own default aborts them)."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._control("/update_weight_version", body)

    async def weight_version(self) -> str:
        """As the engine names what it holds."""
        answer = await self._ask("/model_info", deadline_s=_CONTROL_DEADLINE_S)
        return str(orjson.loads(answer)["weight_version"])

    async def answers(self, *, deadline_s: float) -> bool:
        """The scheduler takes a question between two of its steps: also while paused, not while hung."""
        with contextlib.suppress(ServerError, DeadlineError):
            await self._ask("/server_info", deadline_s=deadline_s)
            return True
        return False

    async def generates(self, *, deadline_s: float) -> bool:
        """The scheduler makes a token: False while paused, starting, or hung."""
        with contextlib.suppress(ServerError, DeadlineError):
            await self._ask("/health_generate", deadline_s=deadline_s)
            return True
        return False

    # ------------------------------------------------------------------ wire

    def _body(self, request: GenerateRequest, *, stream: bool) -> dict[str, Json]:
        self.validate(request.input_ids_T, request.sampling.max_new_tokens)
        sampling: dict[str, Json] = {
            **NEUTRAL_SAMPLING,
            **request.extra_sampling,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "max_new_tokens": request.sampling.max_new_tokens,
            "skip_special_tokens": False,
        }
        for name, values in (("stop", request.stop), ("stop_token_ids", request.stop_token_ids)):
            if values:
                sampling[name] = list(values)
        if request.ignore_eos:
            sampling["ignore_eos"] = True
        top: dict[str, Json] = {"top_logprobs_num": request.top_logprobs} if request.top_logprobs else {}
        return {
            **top,
            "rid": request.rid,
            "input_ids": request.input_ids_T.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": stream,
        }

    @contextlib.asynccontextmanager
    async def _open(
        self, path: str, body: Mapping[str, Json] | None, *, key: str, routing_key: str = ""
    ) -> AsyncIterator[HttpConnection]:
        """The answer's beginning: to a POST of `body`, or to a GET where there is none. ServerError where
        there is none, or another status than 200."""
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if routing_key:
            headers["X-SMG-Routing-Key"] = routing_key
        method, data = ("GET", b"") if body is None else ("POST", orjson.dumps(body))
        try:
            async with self._http.request(method, path, headers, data) as response:
                if response.status != 200:
                    text = (await response.read())[:500].decode(errors="replace")
                    raise ServerError(f"{self.name} answered {path} with {response.status}: {text}")
                yield response
        except HttpError as error:
            raise ServerError(f"{self.name} does not answer {path}: {error}") from error

    async def _control(
        self, path: str, body: Mapping[str, Json], *, deadline_s: float = _CONTROL_DEADLINE_S
    ) -> None:
        await self._ask(path, body, deadline_s=deadline_s, key=self._admin_key)

    async def _ask(
        self,
        path: str,
        body: Mapping[str, Json] | None = None,
        *,
        deadline_s: float,
        key: str | None = None,
        routing_key: str = "",
    ) -> bytes:
        """The whole answer of `_open`. `key` None: the one to sample with."""
        key = self._api_key if key is None else key
        try:
            async with asyncio.timeout(deadline_s):
                async with self._open(path, body, key=key, routing_key=routing_key) as response:
                    return await response.read()
        except TimeoutError:
            raise DeadlineError(f"{self.name} to answer {path}", deadline_s) from None


class _Finish(msgspec.Struct):
    type: FinishReason
    matched: int | str | list[int] | None = None
    message: str = ""


class _Meta(msgspec.Struct):
    """The part of SGLang's `meta_info` that we read; decoding checks it."""

    id: str
    prompt_tokens: int
    weight_version: str
    cached_tokens: int = 0
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    output_top_logprobs: list[list[tuple[float | None, int, str | None]] | None] | None = None
    finish_reason: _Finish | None = None
    weight_versions: list[EngineSpan] | None = None


class _Event(msgspec.Struct):
    meta_info: _Meta | None = None
    error: msgspec.Raw | None = None


_EVENT = msgspec.json.Decoder(_Event)


async def _events(response: HttpConnection) -> AsyncIterator[_Event]:
    """Server-sent events until `[DONE]`."""
    pending = b""
    async for data in response.pieces():
        pending += data
        *lines, pending = pending.split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield _event(line[6:])


def _event(data: bytes) -> _Event:
    try:
        return _EVENT.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ServerError(f"the engine's answer cannot be read: {error}: {data[:200]!r}") from None


class _Reader:
    """Of one generation: of disjoint segments (`--incremental-streaming-output`), or of one whole answer."""

    def __init__(self, request: GenerateRequest) -> None:
        self._rid = request.rid
        self._each = request.top_logprobs
        self._meta: _Meta | None = None
        self._versions = VersionTracker()

    def add(self, event: _Event) -> GenerateChunk:
        if event.meta_info is None:
            detail = bytes(event.error or b"")[:500].decode(errors="replace")
            raise ServerError(f"the engine failed a generation: {detail}")
        if event.meta_info.id != self._rid:  # whatever went wrong on the way: no tokens of another session
            raise ServerError(f"generation {event.meta_info.id} answered for {self._rid}")
        self._meta, sampled, top = event.meta_info, event.meta_info.output_token_logprobs, NO_TOP
        if self._each:  # JSON has no minus infinity
            rows = (each for row in event.meta_info.output_top_logprobs or () for each in row or ())
            top = np.array([(token, -np.inf if told is None else told) for told, token, _ in rows], TOP)
            if len(top) != self._each * len(sampled):
                raise ServerError("the engine did not tell the likeliest tokens of every place")
        self._versions.add(self._meta.weight_version, len(sampled), self._meta.weight_versions)
        return GenerateChunk(
            spans=self._versions.spans,
            ids_T=np.array([token for _, token, _ in sampled], np.int32),
            logprobs_T=np.array([logprob for logprob, _, _ in sampled], np.float32),
            top=top,
            cached_tokens=self._meta.cached_tokens,
        )

    def end(self) -> GenerateEnd:
        if self._meta is None or self._meta.finish_reason is None:
            raise ServerError("the engine ended a generation without a finish reason")
        finish = self._meta.finish_reason
        if not self._versions.certain and finish.type != "abort":
            raise ServerError("the engine's weights changed during a generation, and it does not say where")
        matched = finish.matched
        return GenerateEnd(
            spans=self._versions.spans,
            finish_reason=finish.type,
            matched_stop=matched[-1] if isinstance(matched, list) else matched,
            prompt_tokens=self._meta.prompt_tokens,
            cached_tokens=self._meta.cached_tokens,
        )
