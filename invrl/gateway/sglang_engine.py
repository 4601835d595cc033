"""The engine seam over SGLang's `/generate`, through the router. aiohttp: on this path half the cost of
httpx. Holds one connection pool; made in the gateway's event loop by `app.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NoReturn

import aiohttp
import msgspec

from invrl.gateway.engine import Chunk, EngineError, Generate
from invrl.types import VersionSpan, WeightVersion

_CONNECT_TIMEOUT_S = 10.0
_DONE = b"[DONE]"


class _Finish(msgspec.Struct):
    type: str
    message: str = ""


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float, int, Any]] = []
    weight_version: str = "0"
    weight_versions: list[_Span] = []


class _Output(msgspec.Struct):
    """One answer, or one event of a stream."""

    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: Any = None


class SGLangEngine:
    """`Engine` over HTTP. `close` it in the loop that made it."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self._url = url.rstrip("/") + "/generate"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            read_bufsize=2**20,
        )
        self._decoder = msgspec.json.Decoder(_Output)

    async def generate(self, request: Generate) -> AsyncIterator[Chunk]:
        """See `Engine.generate`."""
        headers = {**self._headers, "X-SMG-Routing-Key": request.session_id}
        seen = 0
        try:
            async with self._http.post(self._url, data=_payload(request), headers=headers) as response:
                if response.status != 200:
                    _refused(response.status, await response.text())
                if not request.stream:
                    yield self._chunk(await response.read(), 0)
                    return
                async for line in response.content:
                    data = line[5:].strip() if line.startswith(b"data:") else b""
                    if data and data != _DONE:
                        chunk = self._chunk(data, seen)
                        seen += len(chunk.ids)
                        yield chunk
        except (TimeoutError, aiohttp.ClientError) as error:
            raise EngineError(f"the connection to the fleet failed: {error!r}", retryable=True) from error

    async def close(self) -> None:
        await self._http.close()

    def _chunk(self, data: bytes, seen: int) -> Chunk:
        """Events repeat the whole output, or hold what is new: either way the new part is at the end."""
        try:
            output = self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise EngineError(f"cannot read the engine's answer: {error}", retryable=False) from error
        meta = output.meta_info
        if meta is None:
            raise EngineError(f"the engine refused: {output.error}", retryable=False)
        new = meta.completion_tokens - seen
        ids = output.output_ids[len(output.output_ids) - new :] if new else []
        logprobs = meta.output_token_logprobs[len(meta.output_token_logprobs) - new :] if new else []
        if [token for _, token, _ in logprobs] != ids or len(ids) != new:
            raise EngineError("the engine's ids, log-probs and count of tokens differ", retryable=False)
        finish = meta.finish_reason
        if finish is not None and finish.type not in ("stop", "length", "abort"):
            raise EngineError(f"unknown finish reason {finish.type!r}", retryable=False)
        return Chunk(
            ids=ids,
            logprobs=[logprob for logprob, _, _ in logprobs],
            prompt_tokens=meta.prompt_tokens,
            cached_tokens=meta.cached_tokens,
            spans=_spans(meta),
            finish_reason=finish.type if finish else None,  # type: ignore[arg-type]
        )


def _spans(meta: _Meta) -> tuple[VersionSpan, ...]:
    """Spans of the output so far; empty ones left out."""
    spans = meta.weight_versions or [_Span(meta.weight_version, 0, meta.completion_tokens)]
    return tuple(
        VersionSpan(version=_version(span.version), start=span.start, end=span.end)
        for span in spans
        if span.end > span.start
    )


def _version(name: str) -> WeightVersion:
    """Engines start with the version "default"."""
    return WeightVersion(0 if name == "default" else int(name))


def _payload(request: Generate) -> bytes:
    sampling = request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": request.stop_token_ids,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if sampling.stop:
        params["stop"] = sampling.stop
    if sampling.logit_bias:
        params["logit_bias"] = sampling.logit_bias
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return msgspec.json.encode(
        {
            "rid": request.rid,
            "input_ids": request.input_ids,
            "sampling_params": params,
            "return_logprob": True,
            "stream": request.stream,
        }
    )


def _refused(status: int, text: str) -> NoReturn:
    raise EngineError(f"the fleet answered {status}: {text[:500]}", retryable=status >= 500)
