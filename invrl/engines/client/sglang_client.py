"""A typed async client of SGLang's native API: token ids in; ids, log-probs and version
spans out.

`generation.py` has the request and the result of a generation, `sglang_responses.py`
the JSON of the responses. The methods under "control" make the other requests.

Invariant: the client sends nothing that would kill a server (as a token id outside the
vocabulary does) or that the server would truncate without an error. Every call has a
deadline. One instance talks to one base URL: to the router (for the gateway, with the
key that samples), or to one engine (for the weight receiver and the health check, with
the admin key too).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Self

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from invrl.engines.client.generation import (
    GenerateChunk,
    GenerateEnd,
    GenerateRequest,
    GenerationReader,
    generate_json,
)
from invrl.engines.client.reply_check import (
    NewestVersion,
    ReplyCheck,
    check_prompt_logprobs,
)
from invrl.engines.client.routed_experts import ExpertsShape
from invrl.engines.client.sglang_responses import (
    decode_checksums,
    decode_drained,
    decode_event,
    decode_load,
    decode_prompt_logprobs,
    decode_weight_version,
    read_events,
)
from invrl.engines.inside_sglang.adapter_routes import (
    ADAPTER_CHECKSUMS_PATH,
    LOAD_ADAPTER_PATH,
    SERVE_ADAPTER_PATH,
)
from invrl.engines.inside_sglang.canary_priority import canary_rid
from invrl.engines.inside_sglang.engine_instance import INSTANCE_HEADER
from invrl.engines.inside_sglang.engine_routes import (
    DRAIN_PATH,
    NAME_PATH,
    PAUSE_PATH,
    REPLY_PATH,
)
from invrl.errors import (
    DeadlineError,
    NoEngineError,
    ServerError,
    SessionError,
    WrongReplyError,
)
from invrl.host.network.http_connection import (
    HttpConnection,
    HttpConnections,
    HttpError,
    NoConnectionError,
)
from invrl.host.output.traces import current_traceparent
from invrl.types.fleet import EngineLoad
from invrl.types.tasks import Json
from invrl.types.weights import WeightVersion

_CONTROL_DEADLINE_S = 60.0
_NO_ENGINE_STATUS = 503
_ROUTER_ERROR_HEADER = "x-smg-error-code"
"""Header of the errors that a router makes itself, and does not pass on."""
_NO_ENGINE_CODES = frozenset(
    {
        "no_available_workers",
        "model_not_found",  # smg without an engine; our requests name no model
        # The engine that a session belongs to is dead, and the router has not noticed.
        "call_upstream_request_error",
        "call_upstream_request_failed",
        "call_upstream_connection_failed",
    }
)
"""Values of that header if no engine got the request."""
_CACHE_MEMORY = "kv_cache"
"""SGLang's tag for the memory of keys and values."""
_IDLE_CONNECTION_S = 2.0
"""Below the server's 5 s, so that it does not close a connection just as we write to
it."""
_RESERVED_KV_SLOTS = 64
"""KV slots that SGLang keeps for itself; a request that needs all slots would wait
forever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of an engine, from the model folder and the engine's settings."""

    vocab_size: int
    context_length: int
    """Tokens of prompt and reply together; the KV cache's size if that is known and
    smaller."""

    @classmethod
    def of(
        cls, model_path: Path | str, *, max_total_tokens: int | None
    ) -> EngineLimits:
        """`max_total_tokens`: tokens that the KV cache holds. None: unknown; only the
        model bounds them."""
        config = json.loads(
            (Path(model_path) / "config.json").read_text(encoding="utf-8")
        )
        context_length = int(config["max_position_embeddings"])
        if max_total_tokens is not None:
            context_length = min(context_length, max_total_tokens - _RESERVED_KV_SLOTS)
        return cls(vocab_size=int(config["vocab_size"]), context_length=context_length)


class _Reply(NamedTuple):
    """A whole response."""

    body: bytes
    engine: str | None
    """Name that the engine gives itself; None if it has none."""


class SglangClient:
    """Async client of one server. Use it inside one event loop, with `async with`, or
    call `close()` at the end."""

    def __init__(
        self,
        base_url: str,
        *,
        limits: EngineLimits,
        api_key: str = "",
        admin_key: str = "",
        name: str = "",
        generate_deadline_s: float = 3600.0,
        experts: ExpertsShape | None = None,
        newest_version: NewestVersion | None = None,
        on_wrong_reply: Callable[[], object] = lambda: None,
    ) -> None:
        """`name`: the server's name in errors. `experts`: the model's shape, if
        generations record the experts of their tokens. `newest_version`: tokens of a
        later one are refused; None: any version may be. `on_wrong_reply`: called for
        each generation that ends with WrongReplyError."""
        self.base_url = base_url.rstrip("/")
        self.name = name or self.base_url
        self.limits = limits
        self.api_key = api_key
        """Key that samples. For an external engine it is known once the engine has been
        reached."""
        self._admin_key = admin_key
        self._generate_deadline_s = generate_deadline_s
        self._experts = experts
        self._newest_version = newest_version
        self._on_wrong_reply = on_wrong_reply
        self._http = HttpConnections(self.base_url, idle_s=_IDLE_CONNECTION_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._http.close()

    def reach(self, base_url: str, *, api_key: str, admin_key: str) -> None:
        """Use this address and these keys from now on: those of some engines are known
        only once they are up."""
        if base_url != self.base_url:
            self._http.close()
            self.base_url = base_url
            self._http = HttpConnections(base_url, idle_s=_IDLE_CONNECTION_S)
        self.api_key = api_key
        self._admin_key = admin_key

    # ----------------------------------------------------------------- generation

    async def stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[GenerateChunk | GenerateEnd, None]:
        """Yield chunks of new tokens as they come, without keeping them. The last item
        is the end.

        Raises SessionError (400) for an invalid request, ServerError, DeadlineError.
        Closing the iterator drops the connection, which ends the generation within
        0.1 s.
        """
        self.validate(request.input_ids_T, request.sampling.max_new_tokens)
        body = generate_json(request, with_experts=self._experts is not None)
        reader = self._reader(request)
        try:
            async with (
                asyncio.timeout(self._generate_deadline_s),
                self._open(
                    "/generate", body, key=self.api_key, routing_key=request.routing_key
                ) as response,
            ):
                reader.engine = response.headers.get(INSTANCE_HEADER)
                async for data in read_events(response):
                    with self._report_wrong_replies():
                        chunk = reader.add(decode_event(data))
                    if len(chunk.ids_T):
                        yield chunk
        except TimeoutError:
            waited_for = f"{self.name} to finish generation {request.rid}"
            raise DeadlineError(waited_for, self._generate_deadline_s) from None
        except ServerError as error:
            # A connection that breaks behind the last token has lost nothing.
            if not reader.has_ended or isinstance(error, WrongReplyError):
                raise
        with self._report_wrong_replies():
            end = reader.end()
        yield end

    @contextlib.contextmanager
    def _report_wrong_replies(self) -> Iterator[None]:
        try:
            yield
        except WrongReplyError:
            self._on_wrong_reply()
            raise

    def _reader(self, request: GenerateRequest) -> GenerationReader:
        check = ReplyCheck(
            rid=request.rid,
            prompt_tokens=len(request.input_ids_T),
            vocab_size=self.limits.vocab_size,
            max_new_tokens=request.sampling.max_new_tokens,
            top_logprobs=request.top_logprobs,
            newest_version=self._newest_version,
        )
        return GenerationReader(request, self._experts, check)

    async def prompt_logprobs(
        self, prompts: Sequence[Sequence[int]], *, deadline_s: float = 120.0
    ) -> list[NDArray[np.float32]]:
        """Return the log-prob [T-1] of each prompt's token t >= 1 given those before
        it, at temperature 1. Runs before the requests that wait in the engine's
        queue."""
        for prompt in prompts:
            self.validate(prompt, 1)
        body: dict[str, Json] = {
            "rid": canary_rid(),  # SGLang numbers the prompts behind it
            "input_ids": [[int(token) for token in prompt] for prompt in prompts],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answers = await self._ask("/generate", body, deadline_s=deadline_s)
        rows = [row[1:] for row in decode_prompt_logprobs(answers)]
        if [len(row) for row in rows] != [len(prompt) - 1 for prompt in prompts]:
            raise WrongReplyError(
                "the prompt log-probs and the prompts differ in length"
            )
        logprobs = [
            np.array([logprob for logprob, _, _ in row], np.float32) for row in rows
        ]
        for logprobs_T in logprobs:
            check_prompt_logprobs(logprobs_T)
        return logprobs

    def validate(
        self, input_ids: Sequence[int] | NDArray[np.int32], max_new_tokens: int
    ) -> None:
        """Raise SessionError (400) for a request that would kill the engine, or that it
        would refuse or truncate."""
        ids_T = np.asarray(input_ids, np.int64)
        if ids_T.size == 0:
            raise SessionError("the prompt is empty", status=400, code="empty_prompt")
        lowest = int(ids_T.min())
        highest = int(ids_T.max())
        if lowest < 0 or highest >= self.limits.vocab_size:
            invalid_id = lowest if lowest < 0 else highest
            reason = f"token id {invalid_id} is outside the vocabulary of {self.limits.vocab_size}"
            raise SessionError(reason, status=400, code="invalid_token_id")
        if max_new_tokens < 1:
            reason = f"max_new_tokens is {max_new_tokens}, at least 1 is needed"
            raise SessionError(reason, status=400, code="invalid_value")
        context_length = self.limits.context_length
        if len(ids_T) + max_new_tokens > context_length:
            lengths = f"{len(ids_T)} prompt tokens and {max_new_tokens} new ones"
            reason = f"{lengths} exceed the context of {context_length}"
            raise SessionError(reason, status=400, code="context_length_exceeded")

    # --------------------------------------------- control (an engine, not the router)

    async def pause(self, mode: Literal["retract", "in_place"] = "retract") -> None:
        """Pause generation. Running requests continue after `resume`. `retract` frees
        their cache, which is then computed again; `in_place` keeps it."""
        await self._control("/pause_generation", {"mode": mode})

    async def pause_and_flush(self) -> None:
        """Pause, and flush the cache, in one request. If the flush is refused, the
        engine is paused all the same."""
        await self._control(PAUSE_PATH, {})

    async def drain(self, timeout_s: float) -> bool:
        """Let running requests end; new ones wait until `resume`. Returns False if a
        request is still running after `timeout_s`."""
        path = f"{DRAIN_PATH}?timeout={timeout_s:g}"
        reply = await self._control(
            path, {}, deadline_s=timeout_s + _CONTROL_DEADLINE_S
        )
        return decode_drained(reply)

    async def resume(self) -> None:
        await self._control("/continue_generation", {"torch_empty_cache": False})

    async def flush_cache(self, *, idle_within_s: float = 0.0) -> None:
        """Flush the cache. The engine refuses while a request runs, and for a moment
        after its reply.

        It therefore waits up to `idle_within_s` until it is idle. A paused engine,
        whose requests wait, needs no time.
        """
        await self._control(f"/flush_cache?timeout={idle_within_s:g}", {})

    async def release_cache_memory(self) -> None:
        """Free the memory of the cache. The engine must be paused and flushed: SGLang
        ends its scheduler if a request runs. Without its memory saver (on a CPU) it
        reports success and frees nothing."""
        await self._control("/release_memory_occupation", {"tags": [_CACHE_MEMORY]})

    async def resume_cache_memory(self) -> None:
        """Take the memory of the cache back, once after `release_cache_memory`: SGLang
        ends its scheduler at a second call."""
        await self._control("/resume_memory_occupation", {"tags": [_CACHE_MEMORY]})

    async def begin_weight_update(self) -> None:
        await self._control("/begin_weight_update", {})

    async def end_weight_update(self) -> None:
        await self._control("/end_weight_update", {})

    async def update_weights_from_tensor(
        self, payloads: Sequence[str], *, load_format: str, deadline_s: float
    ) -> None:
        """`payloads`: one pickled value (base64) per tensor-parallel rank.

        Never sends a version: the server would take it even if the load failed.
        `name_weights` comes after the checks.
        """
        body: dict[str, Json] = {
            "serialized_named_tensors": list(payloads),
            "load_format": load_format,
            "flush_cache": False,
        }
        await self._control("/update_weights_from_tensor", body, deadline_s=deadline_s)

    async def name_weights(self, version: WeightVersion) -> str:
        """Name what is loaded, and read back the name. Running requests go on."""
        reply = await self._control(f"{NAME_PATH}?version={version}", {})
        return decode_weight_version(reply)

    async def weight_version(self) -> str:
        """Return the engine's name for its weights."""
        answer = await self._ask("/model_info", deadline_s=_CONTROL_DEADLINE_S)
        return decode_weight_version(answer)

    async def load_adapter(
        self,
        version: WeightVersion,
        folder: str,
        checksums: Mapping[str, str],
        *,
        deadline_s: float,
    ) -> Mapping[str, str]:
        """Load a version of the adapter from a PEFT folder, beside the one that is
        served. Returns the checksums of what the engine then holds of it."""
        body: dict[str, Json] = {
            "version": str(version),
            "folder": folder,
            "checksums": dict(checksums),
        }
        reply = await self._control(LOAD_ADAPTER_PATH, body, deadline_s=deadline_s)
        return decode_checksums(reply)

    async def serve_adapter(self, version: WeightVersion) -> None:
        """Give this version of the adapter to the requests that arrive from now on."""
        await self._control(f"{SERVE_ADAPTER_PATH}?version={version}", {})

    async def adapter_checksums(
        self, version: str, *, deadline_s: float
    ) -> Mapping[str, str]:
        """Return the checksums of what the engine holds of a version of the adapter."""
        path = f"{ADAPTER_CHECKSUMS_PATH}?version={version}"
        reply = await self._ask(path, deadline_s=deadline_s, key=self._admin_key)
        return decode_checksums(reply)

    async def loader_reply(self, name: str) -> bytes:
        """Return the reply of the engine's weight loader with this name; each reply is
        served once."""
        path = f"{REPLY_PATH}/{name}"
        return await self._ask(
            path, deadline_s=_CONTROL_DEADLINE_S, key=self._admin_key
        )

    async def answers(self, *, deadline_s: float) -> bool:
        """Whether the scheduler answers between two of its steps: it does while paused,
        not while hung."""
        with contextlib.suppress(ServerError, DeadlineError):
            await self._ask("/server_info", deadline_s=deadline_s)
            return True
        return False

    async def load(self, *, deadline_s: float) -> EngineLoad:
        """Return the load that the schedulers published last, without delaying a step.
        Raises ServerError, DeadlineError."""
        reply = await self._ask_named("/v1/loads?include=core", deadline_s=deadline_s)
        return msgspec.structs.replace(decode_load(reply.body), instance=reply.engine)

    async def generates(self, *, deadline_s: float) -> bool:
        """Whether the scheduler makes a token: it does not while paused, starting, or
        hung."""
        with contextlib.suppress(ServerError, DeadlineError):
            await self._ask("/health_generate", deadline_s=deadline_s)
            return True
        return False

    # ----------------------------------------------------------------- HTTP

    async def _control(
        self,
        path: str,
        body: Mapping[str, Json],
        *,
        deadline_s: float = _CONTROL_DEADLINE_S,
    ) -> bytes:
        return await self._ask(path, body, deadline_s=deadline_s, key=self._admin_key)

    async def _ask(
        self,
        path: str,
        body: Mapping[str, Json] | None = None,
        *,
        deadline_s: float,
        key: str | None = None,
    ) -> bytes:
        """Return the body of `_ask_named`."""
        reply = await self._ask_named(path, body, deadline_s=deadline_s, key=key)
        return reply.body

    async def _ask_named(
        self,
        path: str,
        body: Mapping[str, Json] | None = None,
        *,
        deadline_s: float,
        key: str | None = None,
    ) -> _Reply:
        """Return the whole response of `_open`. `key` None stands for the key that
        samples."""
        if key is None:
            key = self.api_key
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._open(path, body, key=key) as response,
            ):
                return _Reply(
                    await response.read(), response.headers.get(INSTANCE_HEADER)
                )
        except TimeoutError:
            raise DeadlineError(f"{self.name} to answer {path}", deadline_s) from None

    @contextlib.asynccontextmanager
    async def _open(
        self,
        path: str,
        body: Mapping[str, Json] | None,
        *,
        key: str,
        routing_key: str = "",
    ) -> AsyncIterator[HttpConnection]:
        """POST `body`, or GET without one. Yields the connection once the response
        begins.

        Raises ServerError if there is no response, or if its status is not 200:
        NoEngineError if no engine got the request.
        """
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if routing_key:
            headers["X-SMG-Routing-Key"] = routing_key
        traceparent = current_traceparent()
        if traceparent:
            headers["traceparent"] = traceparent
        method = "GET" if body is None else "POST"
        data = b"" if body is None else orjson.dumps(body)
        try:
            async with self._http.request(method, path, headers, data) as response:
                if response.status != 200:
                    text = (await response.read())[:500].decode(errors="replace")
                    reason = (
                        f"{self.name} answered {path} with {response.status}: {text}"
                    )
                    code = response.headers.get(_ROUTER_ERROR_HEADER)
                    if response.status == _NO_ENGINE_STATUS or code in _NO_ENGINE_CODES:
                        raise NoEngineError(reason)
                    raise ServerError(reason)
                yield response
        except NoConnectionError as error:
            reason = f"{self.name} does not answer {path}: {error}"
            raise NoEngineError(reason) from error
        except HttpError as error:
            raise ServerError(f"{self.name} does not answer {path}: {error}") from error
