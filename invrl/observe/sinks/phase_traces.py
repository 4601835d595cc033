"""Traces of the steps of a driver, with a span for each phase, also in runs on
files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from invrl.observe.sinks.sinks import Sink

if TYPE_CHECKING:
    from invrl.host.output.traces import Traces
    from invrl.store.timeline_file import Span


class PhaseTraces(Sink):
    """Sends the trace of a step once the step is done. Step 0 is the start, with the
    evaluation before training. An evaluation that ends during a later step has a trace
    alone. Closes `traces`."""

    def __init__(self, traces: Traces) -> None:
        self._traces = traces
        self._spans: list[Span] = []

    def span(self, span: Span) -> None:
        self._spans.append(span)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._send(step)

    def _send(self, step: int) -> None:
        spans = [span for span in self._spans if span.step <= step]
        if not spans:
            return
        self._spans = [span for span in self._spans if span.step > step]
        attributes = {"invrl.step": step}
        start = min(span.start for span in spans)
        end = max(span.end for span in spans)
        place = self._traces.past_span(
            "step", None, start=start, end=end, attributes=attributes
        )
        for span in spans:
            self._traces.past_span(
                span.name,
                place,
                start=span.start,
                end=span.end,
                attributes={"invrl.step": span.step},
            )

    def close(self) -> None:
        """Send the spans of an unfinished step, too, and close the traces."""
        if self._spans:
            self._send(self._spans[-1].step)
        self._traces.close()
