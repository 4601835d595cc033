"""The seam to the fleet: what the gateway asks of `/generate` and what comes back.

`SGLangEngine` in `sglang_engine.py` speaks it to the router, `tests/fakes.py` imitates the server
behind it; both pass `tests/contract/test_generate_protocol.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from invrl.errors import InvrlError
from invrl.gateway.sampling import TurnSampling
from invrl.types import FinishReason, VersionSpan


class EngineError(InvrlError):
    """The fleet cannot do this generation. `retryable`: it never reached an engine, or the engine
    went away, so asking again may help."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """One generation. `rid` is unique; `session_id` keeps a session on one engine, for its cache."""

    rid: str
    session_id: str
    input_ids: Sequence[int]
    sampling: TurnSampling
    stop_token_ids: Sequence[int]
    stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens since the last chunk, with their log-probs. The last chunk has a finish reason, and the
    version spans of the whole output."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    prompt_tokens: int
    cached_tokens: int
    spans: tuple[VersionSpan, ...]
    """Of the whole output so far."""
    finish_reason: FinishReason | None


class Engine(Protocol):
    def generate(self, request: Generate) -> AsyncIterator[Chunk]:
        """Chunks as they are sampled, or a single one without `stream`. Closing the iterator cancels
        the generation. Raises EngineError."""
        ...
