"""Virtual runs of one length distribution, and whether they trained what was asked
for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from invrl.buffer.config import Admission, BufferConfig, WhenStale
from invrl.observe.sinks.sinks import Sink
from invrl.run.plan.jumping_clock import run_jumping
from invrl.run.plan.virtual_run import VirtualRun
from invrl.run.plan.workload import LognormalLengths, Workload

MEAN_LENGTH = 400.0
"""Tokens of a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Lengths are lognormal; half of the variance of the logarithm is the task's."""

    groups: int = 16
    """Groups of a batch."""
    group_size: int = 8
    slots_per_rollout: float = 1.0
    """Concurrency over the rollouts of a batch."""
    sigma: float = 1.0
    token_s: float = 0.0102
    """Seconds of an engine's step with one request."""
    request_s: float = 0.0002
    """Seconds that each further request adds to a step."""
    training_share: float = 1.0
    """Seconds of a training step over those in which the engine, with all slots in use,
    generates a batch of mean lengths."""
    seed: int = 0

    @property
    def workload(self) -> Workload:
        rollouts = self.groups * self.group_size
        workload = Workload(
            lengths=LognormalLengths(
                mean=MEAN_LENGTH,
                sigma=self.sigma,
                group_size=self.group_size,
                seed=self.seed,
            ),
            groups=self.groups,
            group_size=self.group_size,
            slots=max(1, round(self.slots_per_rollout * rollouts)),
            token_s=self.token_s,
            request_s=self.request_s,
            training_s=0.0,
        )
        step_s = workload.step_s(workload.slots)
        packed_s = rollouts * MEAN_LENGTH * step_s / workload.slots
        return replace(workload, training_s=self.training_share * packed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualResult:
    step_ends: list[float]
    """Seconds from the start to the end of each step."""
    batch_tokens: list[int]
    """Tokens of each step's batch."""
    asked_lengths: list[int]
    """Of the rollouts of all groups up to the first one that has not ended."""
    trained_of_asked: list[int]
    """Those of them that were trained."""
    ages: list[int]
    """Of the trained rollouts' oldest tokens, in versions."""

    @property
    def seconds(self) -> float:
        return self.step_ends[-1]

    @property
    def trained_tokens(self) -> int:
        return sum(self.batch_tokens)

    def tokens_per_s(self, *, after_step: int) -> float:
        """Tokens that the steps behind that one trained, for each second of theirs."""
        trained_tokens = sum(self.batch_tokens[after_step:])
        return trained_tokens / (self.seconds - self.step_ends[after_step - 1])

    @property
    def length_ratio(self) -> float:
        """Mean length of what was trained over that of what was asked for."""
        return float(np.mean(self.trained_of_asked) / np.mean(self.asked_lengths))


@dataclass(slots=True)
class StepEnds(Sink):
    """When the steps ended, on the clock of the event loop."""

    seconds: list[float] = field(default_factory=list)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.seconds.append(asyncio.get_running_loop().time())


def virtual_run(
    workload: Workload,
    *,
    num_steps: int,
    max_staleness: int,
    when_stale: WhenStale = "train",
    admission: Admission = "groups",
    over_sampling_groups: int = 0,
) -> VirtualResult:
    config = BufferConfig(
        max_staleness=max_staleness,
        when_stale=when_stale,
        admission=admission,
        over_sampling_groups=over_sampling_groups,
        group_filter="none",
    )
    return run_jumping(_run(workload, config, num_steps))


async def _run(
    workload: Workload, config: BufferConfig, num_steps: int
) -> VirtualResult:
    step_ends = StepEnds()
    run = VirtualRun(workload, config, observer=step_ends)
    await run.make_steps(num_steps)
    open_groups = [
        *(group.group_id for group in run.buffer.wait_report().in_flight),
        *(group.id for group in run.buffer.takeable()),
    ]
    first_unleased = run.buffer.snapshot(run.version).groups_leased
    num_settled = min(
        (int(name.removeprefix("g")) for name in open_groups), default=first_unleased
    )
    asked: list[int] = []
    for number in range(num_settled):
        asked += [round(length) for length in workload.lengths.of_group(number)]
    batch_tokens: list[int] = []
    trained_of_asked: list[int] = []
    ages: list[int] = []
    for batch in run.batches:
        batch_tokens.append(0)
        for group in batch.groups:
            lengths = [rollout.sampled_tokens for rollout in group.rollouts_G]
            batch_tokens[-1] += sum(lengths)
            if int(group.id.removeprefix("g")) < num_settled:
                trained_of_asked += lengths
            ages += [
                batch.version - rollout.oldest_version for rollout in group.rollouts_G
            ]
    return VirtualResult(
        step_ends=step_ends.seconds,
        batch_tokens=batch_tokens,
        asked_lengths=asked,
        trained_of_asked=trained_of_asked,
        ages=ages,
    )
