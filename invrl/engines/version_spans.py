"""Under which weights the tokens of one generation were sampled, from what SGLang tells of it. Pure.

Only the event that ends an answer says it for every token. Each event before it has one label: the version
that the engine's HTTP process held when it passed the event on. Tokens that were on their way while the
weights changed bear the new label although they are of the old weights, so a label is the newest version that
its tokens can have. Used by `sglang_client.py`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from invrl.errors import ServerError
from invrl.types import VersionSpan, WeightVersion


class EngineSpan(msgspec.Struct):
    """Tokens [start, end) of an answer, as the engine puts it."""

    version: str
    start: int
    end: int


class VersionTracker:
    """Of one generation, event by event."""

    def __init__(self) -> None:
        self.spans: tuple[VersionSpan, ...] = ()
        """They tile the tokens so far."""
        self.certain = True
        """The engine has told the version of every token, or there was only one."""
        self._label: str | None = None
        """Of the event before."""
        self._sampled = 0

    def add(self, label: str, sampled: int, told: Sequence[EngineSpan] | None) -> None:
        """An event of `sampled` new tokens, labelled `label`. `told`: the engine's own spans, which only the
        last event has. ServerError where these leave a token out, or where a version is no number.

        Without `told` the tokens count as sampled under the label of the event before: no newer than they
        are, as long as what was on its way during an update came as one event. So the record of an answer
        that broke off may overstate how old its weights were. The first event has no label but its own, which
        is too new if the update came between its sampling and its passing on. A turn that broke off is never
        trained."""
        self._sampled += sampled
        if told:
            self.spans = _exact(told, self._sampled)
            self.certain = True
        else:
            before = label if self._label is None else self._label
            if label != before:
                self.certain = False
            if sampled:
                self._append(before)
        self._label = label

    def _append(self, label: str) -> None:
        version = _number(label)
        start = 0
        earlier = self.spans
        if earlier:
            last = earlier[-1]
            start = last.end
            if last.version == version:
                start = last.start
                earlier = earlier[:-1]
        self.spans = (*earlier, VersionSpan(version=version, start=start, end=self._sampled))


def _exact(told: Sequence[EngineSpan], sampled: int) -> tuple[VersionSpan, ...]:
    """The engine's spans, empty ones left out, cut at `sampled` tokens."""
    spans: list[VersionSpan] = []
    at = 0
    for span in told:
        end = min(span.end, sampled)
        if end <= span.start:
            continue
        if span.start != at:
            break
        spans.append(VersionSpan(version=_number(span.version), start=at, end=end))
        at = end
    if at != sampled:
        raise ServerError(f"the engine's version spans {list(told)} do not cover {sampled} sampled tokens")
    return tuple(spans)


def _number(label: str) -> WeightVersion:
    if not label.isdecimal():
        raise ServerError(f"the engine names its weights {label!r}, which is no version of ours")
    return WeightVersion(int(label))
