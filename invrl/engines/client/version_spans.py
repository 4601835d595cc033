"""The weight versions that sampled the tokens of a generation, from SGLang's reports.
Pure.

Every event of a reply reports the version of each token so far
(`inside_sglang/event_versions.py`), so the tokens of a reply that breaks off have exact
versions, too.
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


def version_spans(
    engine_spans: Sequence[EngineSpan], num_tokens: int
) -> tuple[VersionSpan, ...]:
    """Return the engine's spans without empty ones, cut at `num_tokens`. Raises
    WrongReplyError if they omit a token, or if a version is not a number."""
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
