"""Where the time of one training step goes, by torch's profiler.

Imports torch when it is imported.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

_ROWS_OF_TABLE = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    kernels: int
    """That ran on the card, and copies."""
    span_s: float
    """From the begin of the first to the end of the last."""
    busy_share: float
    """Of that span, in which at least one of them ran."""


def profile_step(step: Callable[[], object], table: Path) -> StepProfile:
    """Runs the step once. Writes the operations that take most time of the card itself
    (on a machine without one: of the processor) to `table`."""
    on_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU]
    order = "self_cpu_time_total"
    if on_cuda:
        activities.append(ProfilerActivity.CUDA)
        order = "self_cuda_time_total"
    with profile(activities=activities) as profiler:
        step()
        if on_cuda:
            torch.cuda.synchronize()
    averages = profiler.key_averages()
    table.write_text(
        averages.table(
            sort_by=order, row_limit=_ROWS_OF_TABLE, max_name_column_width=100
        ),
        encoding="utf-8",
    )
    return _summary(profiler.events() or [])


def _summary(events: Iterable[FunctionEvent]) -> StepProfile:
    spans: list[tuple[float, float]] = []
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            spans.append((event.time_range.start, event.time_range.end))
    if not spans:
        return StepProfile(kernels=0, span_s=0.0, busy_share=0.0)
    spans.sort()
    first = spans[0][0]
    last = first
    busy = 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    microseconds = last - first
    return StepProfile(
        kernels=len(spans),
        span_s=microseconds / 1e6,
        busy_share=busy / max(microseconds, 1e-9),
    )
