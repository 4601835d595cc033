"""The JSON that SGLang answers `/generate` with: the fields that we read. Decoding checks them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from invrl.engines.http_connection import HttpConnection
from invrl.engines.version_spans import EngineSpan
from invrl.errors import ServerError
from invrl.types import FinishReason

TokenLogprob = tuple[float, int, str | None]
"""Log-prob, token id, and text that we do not ask for."""
TopLogprob = tuple[float | None, int, str | None]
"""As `TokenLogprob`; None stands for minus infinity, which JSON does not have."""


class Finish(msgspec.Struct):
    type: FinishReason
    matched: int | str | list[int] | None = None
    message: str = ""


class MetaInfo(msgspec.Struct):
    """The part of SGLang's `meta_info` that we read."""

    id: str
    prompt_tokens: int
    weight_version: str
    cached_tokens: int = 0
    output_token_logprobs: list[TokenLogprob] = []
    output_top_logprobs: list[list[TopLogprob] | None] | None = None
    finish_reason: Finish | None = None
    weight_versions: list[EngineSpan] | None = None
    routed_experts: str | None = None
    """Only at the end of an answer."""


class GenerateEvent(msgspec.Struct):
    """One event of a stream (the tokens since the event before), or a whole answer."""

    meta_info: MetaInfo | None = None
    error: msgspec.Raw | None = None


_DECODER = msgspec.json.Decoder(GenerateEvent)
_DATA = b"data: "
_DONE = b"data: [DONE]"


def decode_event(data: bytes) -> GenerateEvent:
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ServerError(f"the engine's answer cannot be read: {error}: {data[:200]!r}") from None


async def events_of(response: HttpConnection) -> AsyncIterator[GenerateEvent]:
    """The server-sent events of a streamed answer, without the final `[DONE]`."""
    pending = b""
    async for data in response.pieces():
        pending += data
        *lines, pending = pending.split(b"\n")
        for line in lines:
            if line.startswith(_DATA) and not line.startswith(_DONE):
                yield decode_event(line[len(_DATA) :])
