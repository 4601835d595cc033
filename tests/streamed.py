"""A streamed answer put together: the client keeps none of its tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from invrl.engines.client.generation import (
    GenerateChunk,
    GenerateEnd,
    GenerateRequest,
)


class Generated(GenerateEnd, frozen=True, kw_only=True, eq=False):
    """A finished generation with its tokens."""

    ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    top: NDArray[np.void]


class Samples(Protocol):
    """The part of `SglangClient` that samples."""

    def stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[GenerateChunk | GenerateEnd, None]: ...


async def generate(client: Samples, request: GenerateRequest) -> Generated:
    _, generated = await collect(client.stream(request))
    return generated


async def collect(
    stream: AsyncIterable[GenerateChunk | GenerateEnd],
    each: Callable[[], object] = lambda: None,
) -> tuple[list[GenerateChunk], Generated]:
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
    return chunks, Generated(
        **msgspec.structs.asdict(end), ids_T=ids_T, logprobs_T=logprobs_T, top=top
    )
