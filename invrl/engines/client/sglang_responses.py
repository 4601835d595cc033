"""JSON of SGLang's responses: the fields that we read. Decoding checks them, and raises
WrongReplyError for a response of another form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec

from invrl.engines.client.version_spans import EngineSpan
from invrl.errors import WrongReplyError
from invrl.host.network.http_connection import HttpConnection
from invrl.types.fleet import EngineLoad
from invrl.types.turns import FinishReason

_T = TypeVar("_T")

TokenLogprob = tuple[float, int, str | None]
"""Log-prob, token id, and text, which we do not request."""
TopLogprob = tuple[float | None, int, str | None]
"""`TokenLogprob` in which None stands for minus infinity, which JSON lacks."""


class Finish(msgspec.Struct):
    type: FinishReason
    matched: int | str | list[int] | None = None
    message: str = ""


class MetaInfo(msgspec.Struct):
    """Part of SGLang's `meta_info` that we read."""

    id: str
    prompt_tokens: int = 0
    """Absent in the abort of a request that waits."""
    completion_tokens: int = 0
    """Tokens of the whole reply so far."""
    cached_tokens: int = 0
    output_token_logprobs: list[TokenLogprob] = []
    output_top_logprobs: list[list[TopLogprob] | None] | None = None
    finish_reason: Finish | None = None
    weight_versions: list[EngineSpan] = []
    """Versions of all tokens of the reply so far."""
    routed_experts: str | None = None
    """Present only at the end of a reply."""


class GenerateEvent(msgspec.Struct):
    """One event of a stream: the tokens since the previous event."""

    meta_info: MetaInfo | None = None
    output_ids: list[int] = []
    error: msgspec.Raw = msgspec.Raw()
    """Present instead of tokens if the engine has failed the generation."""


class _Loads(msgspec.Struct):
    loads: list[EngineLoad]


class _Drained(msgspec.Struct):
    drained: bool


class _Version(msgspec.Struct):
    weight_version: str


class _Checksums(msgspec.Struct):
    checksums: dict[str, str]


def decode_load(data: bytes) -> EngineLoad:
    loads = _decode(data, _LOADS).loads
    if len(loads) == 1:
        return loads[0]
    number = max(1, len(loads))
    kv_tokens = [load.kv_tokens for load in loads if load.kv_tokens is not None]
    return EngineLoad(
        kv_tokens=sum(kv_tokens) if kv_tokens else None,
        kv_used=sum(load.kv_used for load in loads),
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        kv_use=sum(load.kv_use for load in loads) / number,
        cache_hit_rate=sum(load.cache_hit_rate for load in loads) / number,
        tokens_per_s=sum(load.tokens_per_s for load in loads),
    )


_EVENT = msgspec.json.Decoder(GenerateEvent)
_LOADS = msgspec.json.Decoder(_Loads)
_DATA = b"data: "
_DONE = b"data: [DONE]"


def decode_event(data: bytes) -> GenerateEvent:
    return _decode(data, _EVENT)


def decode_drained(data: bytes) -> bool:
    """Return whether an engine has drained."""
    return _decode(data, msgspec.json.Decoder(_Drained)).drained


def decode_checksums(data: bytes) -> dict[str, str]:
    """Return the checksums of an adapter's factors, by their names."""
    return _decode(data, msgspec.json.Decoder(_Checksums)).checksums


def decode_weight_version(data: bytes) -> str:
    """Return an engine's name for its weights."""
    return _decode(data, msgspec.json.Decoder(_Version)).weight_version


def _decode(data: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WrongReplyError(f"it cannot be read: {error}: {data[:200]!r}") from None


class _PromptMeta(msgspec.Struct):
    input_token_logprobs: list[TopLogprob]


class _PromptAnswer(msgspec.Struct):
    meta_info: _PromptMeta


def decode_prompt_logprobs(data: bytes) -> list[list[TopLogprob]]:
    """Return the log-prob of each token [T] of each prompt; None for the first."""
    answers = _decode(data, msgspec.json.Decoder(list[_PromptAnswer]))
    return [answer.meta_info.input_token_logprobs for answer in answers]


async def read_events(response: HttpConnection) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a streamed response, for `decode_event`, without
    the final `[DONE]`. One read may bring hundreds; other tasks get their turn in
    between."""
    pending = b""
    async for data in response.pieces():
        pending += data
        *lines, pending = pending.split(b"\n")
        is_first = True
        for line in lines:
            if line.startswith(_DATA) and not line.startswith(_DONE):
                if not is_first:
                    await asyncio.sleep(0)
                is_first = False
                yield line[len(_DATA) :]
