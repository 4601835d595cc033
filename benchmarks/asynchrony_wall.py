"""Whether a run takes as long as its virtual run says: the same lengths, paces and
settings on a real clock and on one that jumps.

    python -m benchmarks.asynchrony_wall [--repetitions 2] [--out FILE]

The real run has the real gateway, router, buffer, rollout worker, dispatcher and loop.
The engine answers whole turns, each after its tokens' time; trainer and weight updates
only sleep. Synchronous and asynchronous runs take turns. Exit code 1: some run took over
3 % longer or shorter than `invrl/run/plan/virtual_run.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from local_ray import local_ray
from loop_parts import FixedSteps, assemble_nothing, save_nothing, sync_at_once
from tiny_model import make_tiny_model
from virtual_run import virtual_run

from benchmarks.gateway_load.rig import Rig
from benchmarks.record import entry
from invrl.buffer.config import BufferConfig
from invrl.buffer.process.buffer_actor import BufferActor
from invrl.buffer.process.buffer_handle import BufferHandle
from invrl.engines.client.sglang_client import EngineLimits
from invrl.host.ray.actor import ActorOptions, start_actor
from invrl.host.ray.ray_setup import worker_environment
from invrl.interfaces import Endpoint, RolloutResult, StepResult
from invrl.observe.sinks.sinks import Sink
from invrl.rollout.config import RolloutConfig
from invrl.rollout.dispatch.rollout_handle import RolloutHandle
from invrl.run.loop.loop import Learner, Parts, run_loop
from invrl.run.plan.workload import LognormalLengths, Workload
from invrl.types.batches import TakenBatch, TrainBatch
from invrl.types.rollouts import RolloutSummary
from invrl.types.tasks import Task
from invrl.types.weights import WeightUpdate, WeightVersion

TOLERANCE = 0.03
_DEADLINE_S = 240.0
_WORKLOAD = Workload(
    lengths=LognormalLengths(mean=60.0, sigma=0.5, group_size=4),
    groups=4,
    group_size=4,
    slots=16,
    token_s=0.1,
    request_s=0.0,
    training_s=4.0,
    update_s=0.5,
)
"""The engine keeps its pace whatever the number of requests."""
_NUM_STEPS = {0: 3, 4: 8}
"""Steps of a run, by its staleness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    max_staleness: int
    wall_step_s: float
    virtual_step_s: float
    ratio: float
    wall_tokens: int
    virtual_tokens: int
    turn_s: float
    """Mean time of a trained turn, as its client sees it."""
    engine_s: float
    """Mean time of it that is the engine's."""


class SleepingTrainer(FixedSteps):
    async def train(self, batch: TrainBatch) -> StepResult:
        await asyncio.sleep(_WORKLOAD.training_s)
        return await super().train(batch)


async def sync_slowly(version: WeightVersion) -> WeightUpdate:
    await asyncio.sleep(_WORKLOAD.update_s)
    return await sync_at_once(version)


def endless_tasks() -> Iterator[Task]:
    return (Task(id=str(number), payload={}) for number in itertools.count())


_lengths_left: dict[str, Iterator[int]] = {}
"""Lengths of each task's rollouts that have not begun in this worker."""


async def ask_once(task: Task, endpoint: Endpoint) -> RolloutResult:
    """Make one turn of the task's next length."""
    if task.id not in _lengths_left:
        lengths = _WORKLOAD.lengths.of_group(int(task.id))
        _lengths_left[task.id] = iter([round(length) for length in lengths])
    num_tokens = next(_lengths_left[task.id])
    started_at = time.monotonic()
    await endpoint.openai().chat.completions.create(
        model=endpoint.model,
        messages=[{"role": "user", "content": f"Task {task.id}"}],
        max_tokens=num_tokens,
    )
    seconds = time.monotonic() - started_at
    return RolloutResult(reward=1.0, components={"turn_s": seconds})


def compare(
    max_staleness: int, rollouts: Sequence[RolloutSummary], seconds: float
) -> Comparison:
    """Compare the real run that trained these rollouts with the virtual one."""
    num_steps = _NUM_STEPS[max_staleness]
    virtual = virtual_run(_WORKLOAD, num_steps=num_steps, max_staleness=max_staleness)
    tokens = sum(rollout.sampled_tokens for rollout in rollouts)
    return Comparison(
        max_staleness=max_staleness,
        wall_step_s=seconds / num_steps,
        virtual_step_s=virtual.seconds / num_steps,
        ratio=seconds / virtual.seconds,
        wall_tokens=tokens,
        virtual_tokens=virtual.trained_tokens,
        turn_s=fmean(rollout.reward_components["turn_s"] for rollout in rollouts),
        engine_s=_WORKLOAD.token_s * tokens / len(rollouts),
    )


async def run_on_wall_clock(
    rig: Rig, max_staleness: int
) -> tuple[list[RolloutSummary], float]:
    """Return the trained rollouts, and the seconds from the first lease to the last
    weight update."""
    num_steps = _NUM_STEPS[max_staleness]
    trained: list[RolloutSummary] = []

    def assemble(step: int, taken: TakenBatch) -> TrainBatch:
        for group in taken.groups:
            trained.extend(group.rollouts_G)
        return assemble_nothing(step, taken)

    config = RolloutConfig.model_validate(
        {
            "rollout_function_path": "benchmarks.asynchrony_wall:ask_once",
            "rollout_batch_size": _WORKLOAD.groups,
            "n_samples_per_prompt": _WORKLOAD.group_size,
            "rollout_concurrency": _WORKLOAD.slots,
        }
    )
    actor = start_actor(
        "the buffer",
        BufferActor,
        ActorOptions(),
        BufferConfig.model_validate(
            {"max_staleness": max_staleness, "group_filter": "none"}
        ),
        config,
        tasks_factory=endless_tasks,
        run_store_path=rig.store_path("on"),
    )
    buffer = BufferHandle(actor=actor, batch_timeout_s=_DEADLINE_S)
    rollouts = RolloutHandle(
        config,
        buffer=buffer,
        gateway_url=rig.gateways["on"].url,
        env_key=rig.env_key,
        model="bench",
        seed=0,
    )
    learner = Learner(
        trainer=SleepingTrainer([1] * num_steps),
        sync=sync_slowly,
        save=save_nothing,
    )
    parts = Parts(buffer=buffer, assemble=assemble, observer=Sink(), learner=learner)
    try:
        await buffer.start()
        await rollouts.start()
        started_at = time.monotonic()
        rollouts.dispatch()
        await rollouts.guard(run_loop(parts, done=0, num_steps=num_steps))
        seconds = time.monotonic() - started_at
    finally:
        await rollouts.stop()
        actor.kill()
    return trained, seconds


async def run_in_turns(
    rig: Rig, repetitions: int
) -> list[tuple[int, list[RolloutSummary], float]]:
    try:
        await rig.start()
        rig.pace(_WORKLOAD.token_s)
        return [
            (max_staleness, *await run_on_wall_clock(rig, max_staleness))
            for max_staleness in list(_NUM_STEPS) * repetitions
        ]
    finally:
        rig.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if the clocks disagree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the results as JSON")
    options = parser.parse_args(arguments)
    load_before = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory(prefix="invrl-wall-") as name:
        folder = Path(name)
        model = make_tiny_model(folder / "tiny")
        limits = EngineLimits.of(model, max_total_tokens=8192)
        rig = Rig(
            folder,
            model_path=model,
            vocab_size=limits.vocab_size,
            reply_ids=range(40, 60),
        )
        os.environ.update(worker_environment(), RAY_worker_niceness="0")
        with local_ray():
            runs = asyncio.run(run_in_turns(rig, options.repetitions))
    rows = [compare(*run) for run in runs]
    for row in rows:
        print(
            f"staleness {row.max_staleness}: wall {row.wall_step_s:.3f} "
            f"s/step, virtual {row.virtual_step_s:.3f}, ratio {row.ratio:.4f}; "
            f"a turn {row.turn_s:.3f} s, the engine's {row.engine_s:.3f}"
        )
    ratios = {
        f"staleness_{max_staleness}": fmean(
            row.ratio for row in rows if row.max_staleness == max_staleness
        )
        for max_staleness in _NUM_STEPS
    }
    if options.out is not None:
        result = {
            **asdict(entry("tiny, paced", ratios)),
            "load_before": load_before,
            "workload": asdict(_WORKLOAD),
            "rows": [asdict(row) for row in rows],
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(abs(row.ratio - 1) > TOLERANCE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
