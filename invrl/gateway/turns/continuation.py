"""A generation as segments: spans of tokens that one engine after another samples. Pure.

When an engine fails in the middle of a reply, the next request has the prompt and the
tokens sampled so far, and the rest of the token budget. Invariant: the tokens of all
segments are distributed as those of one request would be. A generation for which an
engine would need to know more than the tokens is not moved (`NotMoved`).

Seeds need no care: SGLang draws a token from the seed and its position in the sequence,
so a generation with a seed continues with the same numbers.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec
import numpy as np

from invrl.engines.client.generation import (
    NEUTRAL_SAMPLING,
    GenerateChunk,
    GenerateEnd,
    GenerateRequest,
)
from invrl.errors import ServerError, WrongReplyError
from invrl.types.routed_experts import RoutedExperts, unknown_expert
from invrl.types.tasks import Json
from invrl.types.turns import Segment, VersionSpan

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_INDEPENDENT = frozenset({"top_k", "min_p", "logit_bias", "sampling_seed"})
"""SGLang's parameters whose effect on a token does not depend on the reply before
it."""


class NotMoved(StrEnum):
    """Reason that a generation with sampled tokens is not continued on another
    engine."""

    GRAMMAR = "grammar"
    """A grammar constrains the reply, and an engine begins it with the request."""
    PARAMETER = "parameter"
    """A penalty, or another parameter that depends on the tokens of the reply, which an
    engine counts from the request on."""
    STOP_STRING = "stop_string"
    """The text so far may end with the beginning of a stop string, which an engine
    would not recognize in the rest of the reply."""
    WRONG_REPLY = "wrong_reply"
    """The engine that sampled the last segment sent a reply that cannot be true, so its
    earlier tokens are not trusted either."""
    NO_ENGINE = "no_engine"
    """All tries to continue it failed, or no engine came within the deadline."""


class Segments:
    """The segments of one generation. The last one is being sampled."""

    def __init__(self, request: GenerateRequest) -> None:
        """`request`: the first one, which the whole reply answers."""
        self._request = request
        self._ids = array("i")
        """All tokens so far."""
        self._earlier_spans: tuple[VersionSpan, ...] = ()
        """Versions of the tokens of all segments but the last."""
        self._last_spans: tuple[VersionSpan, ...] = ()
        self._num_requests = 1
        self._begun: list[tuple[str | None, int]] = []
        """Engine and first token of each request that sampled tokens."""
        self.cached_tokens = 0
        """Prompt tokens that the first of their engines had cached."""

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Versions of all tokens so far."""
        return joined_spans(self._earlier_spans, self._last_spans)

    @property
    def num_segments(self) -> int:
        """Number of requests that sampled tokens."""
        return len(self._begun)

    @property
    def by_engine(self) -> tuple[Segment, ...]:
        """Segments with the engines that sampled them."""
        ends = [*(start for _, start in self._begun[1:]), len(self._ids)]
        return tuple(
            Segment(engine=engine, start=start, end=end)
            for (engine, start), end in zip(self._begun, ends, strict=False)
        )

    @property
    def num_sampled(self) -> int:
        """Number of tokens of all segments."""
        return len(self._ids)

    @property
    def has_new_tokens(self) -> bool:
        """Whether the last segment has tokens."""
        return bool(self._last_spans)

    def add(self, chunk: GenerateChunk) -> None:
        """Add the chunk's tokens to the last segment. One without tokens is ignored: it
        would begin a segment without a span, and the next a second one at its start."""
        if not len(chunk.ids_T):
            return
        if not self._last_spans:
            self._begun.append((chunk.engine, len(self._ids)))
        if self.num_segments == 1:
            self.cached_tokens = chunk.cached_tokens
        self._last_spans = chunk.spans
        self._ids.frombytes(chunk.ids_T.tobytes())

    def continuation(
        self, error: ServerError, *, is_text_settled: bool
    ) -> GenerateRequest | GenerateEnd | NotMoved:
        """Return what follows the failure of the last segment's engine: the request of
        the next segment, the end if the reply is complete, or the reason that it cannot
        be moved. `is_text_settled`: no text at the end of the tokens may change, or
        become a stop string, with further tokens."""
        if self._ids:
            if self._last_spans and isinstance(error, WrongReplyError):
                return NotMoved.WRONG_REPLY
            end = self._end_reached()
            if end is not None:
                return end
            if self._request.stop and not is_text_settled:
                return NotMoved.STOP_STRING
            dependence = _dependence(self._request.extra_sampling)
            if dependence is not None:
                return dependence
        self._earlier_spans = self.spans
        self._last_spans = ()
        return self._next_request()

    def restart(self) -> GenerateRequest:
        """Forget all tokens. Return the request that samples the reply anew."""
        self._ids = array("i")
        self._earlier_spans = ()
        self._last_spans = ()
        self._begun = []
        return self._next_request()

    def _next_request(self) -> GenerateRequest:
        """Return the request that continues the tokens so far, with an id that no
        engine knows.

        No id of a turn's requests begins with another: SGLang ends every request whose
        id begins with the one that is aborted, and it aborts the request before this
        one when it sees, seconds later, that its connection is closed.
        """
        request = self._request
        rid = f"again-{self._num_requests}-{request.rid}"
        self._num_requests += 1
        rest = request.sampling.max_new_tokens - len(self._ids)
        return msgspec.structs.replace(
            request,
            rid=rid,
            input_ids_T=np.concatenate(
                [request.input_ids_T, np.array(self._ids, np.int32)]
            ),
            sampling=dataclasses.replace(request.sampling, max_new_tokens=rest),
        )

    def joined(self, end: GenerateEnd) -> GenerateEnd:
        """Return the end of the whole reply. `end`: that of the last segment."""
        if not self._earlier_spans:
            return end
        return GenerateEnd(
            spans=self.spans,
            finish_reason=end.finish_reason,
            matched_stop=end.matched_stop,
            cached_tokens=self.cached_tokens,
            experts_TLK=self._joined_experts(end.experts_TLK),
        )

    def _end_reached(self) -> GenerateEnd | None:
        """Return the end of the reply if its last token ends it, and the engine failed
        before it said so."""
        request = self._request
        last_id = self._ids[-1]
        finish_reason = matched_stop = None
        if not request.ignore_eos and last_id in request.stop_token_ids:
            finish_reason = "stop"
            matched_stop = last_id
        elif len(self._ids) >= request.sampling.max_new_tokens:
            finish_reason = "length"
        if finish_reason is None:
            return None
        return GenerateEnd(
            spans=self.spans,
            finish_reason=finish_reason,
            matched_stop=matched_stop,
            cached_tokens=self.cached_tokens,
        )

    def _joined_experts(
        self, experts_TLK: RoutedExperts | None
    ) -> RoutedExperts | None:
        """Return the experts of the turn's tokens. The last engine reports those of all
        of them, because the earlier segments are a part of its prompt. Those of tokens
        that other weights sampled are unknown, as after an update in the middle of a
        reply."""
        if experts_TLK is None:
            return None
        num_context = len(self._request.input_ids_T) - self._request.path_tokens
        num_lost = self.spans[-1].start
        joined_TLK = experts_TLK.copy()
        joined_TLK[num_context : num_context + num_lost] = unknown_expert(
            experts_TLK.dtype
        )
        return joined_TLK


def joined_spans(
    earlier: Sequence[VersionSpan], later: Sequence[VersionSpan]
) -> tuple[VersionSpan, ...]:
    """Append the spans of the tokens that follow. Two spans of one version become one
    where they meet."""
    spans = list(earlier)
    offset = spans[-1].end if spans else 0
    for span in later:
        start = offset + span.start
        if spans and spans[-1].version == span.version:
            start = spans.pop().start
        spans.append(
            VersionSpan(version=span.version, start=start, end=offset + span.end)
        )
    return tuple(spans)


def _dependence(parameters: Mapping[str, Json]) -> NotMoved | None:
    """Return the reason that the tokens of a reply depend, by SGLang's parameters, on
    more than the tokens before them."""
    for name, value in parameters.items():
        if name in _INDEPENDENT or value == NEUTRAL_SAMPLING.get(name):
            continue
        return NotMoved.GRAMMAR if name in _GRAMMARS else NotMoved.PARAMETER
    return None
