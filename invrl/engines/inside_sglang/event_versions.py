"""Makes every event of a streamed reply report the weight version of each token so far.

SGLang reports the versions only in the event that ends a reply. The events before it
have one label: the version that the HTTP process held when the event passed. A reply
that breaks off, and is continued by another engine, would therefore have tokens of
unknown versions where the weights had changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def report_versions_in_every_event() -> None:
    """Add the versions to the scheduler's output. Call this in the scheduler's process
    or the one that it is forked from. Imports SGLang."""
    from sglang.srt.managers.scheduler_components.output_streamer import (
        _GenerationStreamAccumulator,
    )
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    accept = _GenerationStreamAccumulator.accept

    def accept_with_versions(self: _GenerationStreamAccumulator, *, req: Req) -> None:
        accept(self, req=req)
        if self.weight_versions and self.weight_versions[-1] is None:
            self.weight_versions[-1] = compute_weight_version_spans(
                req.weight_version_events,
                current_version=self.current_weight_version or "",
                num_output_tokens=self.completion_tokens[-1],
            )

    _GenerationStreamAccumulator.accept = accept_with_versions
