"""A streamed answer put together: the client keeps none of its tokens."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable

import msgspec
import numpy as np

from invrl.engines.client.generation import GenerateChunk, GenerateEnd, GenerateResult


async def collect(
    stream: AsyncIterable[GenerateChunk | GenerateEnd],
    each: Callable[[], object] = lambda: None,
) -> tuple[list[GenerateChunk], GenerateResult]:
    """The chunks, and what they make with the end behind them. `each` is called at
    every chunk."""
    chunks = list[GenerateChunk]()
    ends = list[GenerateEnd]()
    async for item in stream:
        assert not ends
        if isinstance(item, GenerateChunk):
            chunks.append(item)
            each()
        else:
            ends.append(item)
    [end] = ends
    ids_T, logprobs_T, top = (
        np.concatenate([getattr(chunk, name) for chunk in chunks])
        for name in ("ids_T", "logprobs_T", "top")
    )
    return chunks, GenerateResult(
        **msgspec.structs.asdict(end), ids_T=ids_T, logprobs_T=logprobs_T, top=top
    )
