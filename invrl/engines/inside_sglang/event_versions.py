"""Makes every event of a streamed reply report the weight version of each token so far.

SGLang reports the versions only in the event that ends a reply. The events before it
have one label: the version that the HTTP process held when the event passed. A reply
that breaks off, and is continued by another engine, would therefore have tokens of
unknown versions where the weights had changed.

All tokens of a request with an adapter have the adapter's version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from invrl.engines.inside_sglang.adapter_loads import version_of_adapter

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
        num_before = len(self.weight_versions)
        accept(self, req=req)
        if len(self.weight_versions) == num_before:
            return
        adapter_version = version_of_adapter(req.lora_id)
        if adapter_version is not None:
            self.weight_versions[-1] = compute_weight_version_spans(
                [],
                current_version=adapter_version,
                num_output_tokens=self.completion_tokens[-1],
            )
        elif self.weight_versions[-1] is None:
            self.weight_versions[-1] = compute_weight_version_spans(
                req.weight_version_events,
                current_version=self.current_weight_version or "",
                num_output_tokens=self.completion_tokens[-1],
            )

    _GenerationStreamAccumulator.accept = accept_with_versions
