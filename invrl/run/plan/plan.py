"""A plan: how to split the GPUs, how many rollouts to run at a time, and what each
staleness gives.

The split and the concurrency come from closed forms (`workload.py`), the time of a step
and the age of its tokens from a run of the real loop on a clock that jumps.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from invrl.buffer.config import Admission, BufferConfig, WhenStale
from invrl.observe.sinks.sinks import Sink
from invrl.run.plan.config import PlanConfig
from invrl.run.plan.jumping_clock import run_jumping
from invrl.run.plan.virtual_run import VirtualRun
from invrl.run.plan.workload import Lengths, LognormalLengths, Workload

MODES: Sequence[tuple[int, Admission]] = (
    (0, "groups"),
    (1, "groups"),
    (1, "ready"),
    (2, "groups"),
    (2, "ready"),
    (4, "groups"),
    (4, "ready"),
)
"""Staleness and admission of the runs that are tried."""
_ROLLOUTS = 1_500
"""Rollouts of a virtual run, if that makes 8 to 40 steps."""
_WARM_UP = 2
"""First steps that are not measured, beyond `max_staleness`."""
_TOLERANCE = 0.03
"""Loss of speed for which a smaller staleness is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A virtual run. Ages are in versions."""

    max_staleness: int
    admission: Admission
    step_s: float
    age_mean: float
    """Mean over the oldest and the newest token of each rollout."""
    age_p99: float
    """99th percentile over the oldest token of each rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    workload: Workload
    trainer_gpus: int
    estimates: Sequence[Estimate]

    @property
    def best(self) -> Estimate:
        """The least staleness whose step takes hardly longer than the shortest."""
        shortest_s = min(estimate.step_s for estimate in self.estimates)
        good = [
            estimate
            for estimate in self.estimates
            if estimate.step_s <= (1 + _TOLERANCE) * shortest_s
        ]
        return min(good, key=lambda estimate: (estimate.max_staleness, estimate.step_s))


def present_workload(config: PlanConfig, lengths: Lengths | None = None) -> Workload:
    """Return the workload on the present machine, with one slot for each rollout of a
    batch. `lengths`: None for lognormal ones."""
    group_size = config.n_samples_per_prompt
    if lengths is None:
        lengths = LognormalLengths(
            mean=config.length_mean, sigma=config.length_sigma, group_size=group_size
        )
    return Workload(
        lengths=lengths,
        groups=config.rollout_batch_size,
        group_size=group_size,
        slots=config.rollout_batch_size * group_size,
        num_engines=config.num_engines,
        token_s=config.token_s,
        request_s=config.request_s,
        training_s=config.training_s,
        update_s=config.update_s,
    )


def make_plan(config: PlanConfig, lengths: Lengths | None = None) -> Plan:
    """Plan with the present number of GPUs."""
    workload, trainer_gpus = best_split(config, lengths)
    rule = config.when_stale
    estimates = [
        estimate(workload, max_staleness, admission, when_stale=rule)
        for max_staleness, admission in MODES
        if not (rule == "wait" and admission == "ready")  # a run refuses both together
    ]
    return Plan(workload=workload, trainer_gpus=trainer_gpus, estimates=estimates)


def best_split(
    config: PlanConfig, lengths: Lengths | None = None
) -> tuple[Workload, int]:
    """Return the workload with the shortest step, and the GPUs that the trainer has in
    it. The trainer's time is divided evenly by its GPUs."""
    present = present_workload(config, lengths)
    workloads: Mapping[int, Workload] = {
        trainer_gpus: with_enough_slots(
            replace(
                present,
                num_engines=num_engines,
                training_s=config.training_s * config.trainer_gpus / trainer_gpus,
            )
        )
        for num_engines, trainer_gpus in _splits(config)
    }
    trainer_gpus = min(workloads, key=lambda gpus: workloads[gpus].best_step_s)
    return workloads[trainer_gpus], trainer_gpus


def _splits(config: PlanConfig) -> list[tuple[int, int]]:
    """Return the numbers of engines and of trainer GPUs that use all GPUs."""
    num_gpus = config.num_engines * config.engine_gpus + config.trainer_gpus
    return [
        (num_engines, num_gpus - num_engines * config.engine_gpus)
        for num_engines in range(1, (num_gpus - 1) // config.engine_gpus + 1)
    ]


def with_enough_slots(workload: Workload) -> Workload:
    """Return the workload with the fewest slots, from half as many as a batch has
    rollouts to twice as many, that keep the engines as fast as the trainer. More slots
    make tokens older."""
    rollouts = workload.rollouts
    for slots in range(max(1, rollouts // 2), 2 * rollouts, workload.group_size):
        enough = replace(workload, slots=slots)
        if enough.packed_s <= enough.trainer_s:
            return enough
    return replace(workload, slots=2 * rollouts)


def estimate(
    workload: Workload,
    max_staleness: int,
    admission: Admission = "groups",
    *,
    when_stale: WhenStale = "train",
) -> Estimate:
    """Measure a virtual run."""
    config = BufferConfig.model_validate(
        {
            "max_staleness": max_staleness,
            "admission": admission,
            "when_stale": when_stale,
            "group_filter": "none",
        }
    )
    num_measured = min(40, max(8, _ROLLOUTS // workload.rollouts))
    return run_jumping(_estimate(workload, config, num_measured))


async def _estimate(
    workload: Workload, config: BufferConfig, num_measured: int
) -> Estimate:
    ends = _StepEnds()
    run = VirtualRun(workload, config, observer=ends)
    await run.make_steps(config.max_staleness + _WARM_UP + num_measured)
    ages: list[tuple[int, int]] = []
    for batch in run.batches[-num_measured:]:
        for group in batch.groups:
            for rollout in group.rollouts_G:
                oldest = batch.version - rollout.oldest_version
                ages.append((oldest, batch.version - rollout.newest_version))
    return Estimate(
        max_staleness=config.max_staleness,
        admission=config.admission,
        step_s=(ends.times[-1] - ends.times[-1 - num_measured]) / num_measured,
        age_mean=float(np.mean(ages)),
        age_p99=float(np.percentile([oldest for oldest, _ in ages], 99)),
    )


class _StepEnds(Sink):
    def __init__(self) -> None:
        self.times: list[float] = []

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.times.append(asyncio.get_running_loop().time())
