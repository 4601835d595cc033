"""The weight versions that sampled the tokens of one generation, from SGLang's report.
Pure.

Only the last event of a reply reports the version of every token. Each earlier event
has one label: the version that the engine's HTTP process held when it forwarded the
event. Tokens in transit while the weights changed bear the new label, although the old
weights sampled them. A label is thus the newest version that its tokens can have.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from invrl.errors import WrongReplyError
from invrl.types.turns import VersionSpan
from invrl.types.weights import WeightVersion

_MOST_DIGITS = 18
"""Most digits of a version; such a number fits into 64 bits."""


class EngineSpan(msgspec.Struct):
    """Version of tokens [start, end) of a reply, as the engine reports it."""

    version: str
    start: int
    end: int


class VersionTracker:
    """Version spans of one generation, which grow event by event."""

    def __init__(self) -> None:
        self.spans: tuple[VersionSpan, ...] = ()
        """Spans that tile the tokens so far."""
        self.certain = True
        """Whether the engine has reported the version of every token, or there was only
        one label."""
        self._previous_label: str | None = None
        self._num_tokens = 0

    def add(
        self, label: str, num_new_tokens: int, engine_spans: Sequence[EngineSpan] | None
    ) -> None:
        """Add an event with its label. Only the last event has `engine_spans`, for all
        tokens of the reply.

        Without them the new tokens count as sampled under the previous event's label.
        That version is no newer than theirs, as long as the tokens in transit during an
        update came as one event. The record of an interrupted reply may therefore
        overstate the age of its weights. The first event has no label before it, and
        its own is too new if the update came between sampling and forwarding. An
        interrupted turn is never trained.

        Raises WrongReplyError if the engine's spans omit a token, or if a version is
        not a number.
        """
        self._num_tokens += num_new_tokens
        if engine_spans:
            self.spans = _exact_spans(engine_spans, self._num_tokens)
            self.certain = True
        else:
            previous_label = (
                label if self._previous_label is None else self._previous_label
            )
            if label != previous_label:
                self.certain = False
            if num_new_tokens:
                self._extend(previous_label)
        self._previous_label = label

    def _extend(self, label: str) -> None:
        """Assign this version to the tokens that no span covers yet."""
        version = _version(label)
        start = 0
        earlier = self.spans
        if earlier:
            last = earlier[-1]
            start = last.end
            if last.version == version:
                start = last.start
                earlier = earlier[:-1]
        self.spans = (
            *earlier,
            VersionSpan(version=version, start=start, end=self._num_tokens),
        )


def _exact_spans(
    engine_spans: Sequence[EngineSpan], num_tokens: int
) -> tuple[VersionSpan, ...]:
    """Return the engine's spans without empty ones, cut at `num_tokens`."""
    spans: list[VersionSpan] = []
    covered = 0
    for span in engine_spans:
        end = min(span.end, num_tokens)
        if end <= span.start:
            continue
        if span.start != covered:
            break
        spans.append(
            VersionSpan(version=_version(span.version), start=covered, end=end)
        )
        covered = end
    if covered != num_tokens:
        raise WrongReplyError(
            f"the version spans {list(engine_spans)} do not cover {num_tokens} sampled tokens"
        )
    return tuple(spans)


def _version(label: str) -> WeightVersion:
    if not label.isdecimal() or len(label) > _MOST_DIGITS:
        raise WrongReplyError(
            f"it calls its weight version {label[:40]!r}, which is no version of ours"
        )
    return WeightVersion(int(label))
