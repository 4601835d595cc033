"""The loop, over interfaces only: take a batch -> train -> send weights -> next.

Rollouts go on meanwhile, as far as the buffer's staleness bound allows: bound 0 makes this the
synchronous loop, 1 one-step-off-policy, k fully asynchronous. Nothing here knows which.
Invariant: the buffer admits work for a version only after every engine has committed it, and counts
its tokens only after its canary has passed. Called by `cluster.py`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from invrl.interfaces import Buffer, Trainer
from invrl.metrics import resolve
from invrl.step_metrics import rollout_metrics, time_metrics, update_metrics
from invrl.types import TakenBatch, TrainBatch, WeightUpdate, WeightVersion


class WeightUpdater(Protocol):
    """One weight update as one transaction (`weight_sync.WeightTransaction`)."""

    async def run(self, version: WeightVersion) -> WeightUpdate: ...


class Observer(Protocol):
    """Where phases and numbers go: sinks and the progress display. Never raises."""

    def phase(self, name: str, step: int) -> None: ...
    def step(self, step: int, values: Mapping[str, float]) -> None: ...


Assemble = Callable[[TakenBatch], TrainBatch]
"""Fetches the tokens of a taken batch from the run's store and computes advantages."""
Evaluate = Callable[[WeightVersion], Awaitable[Mapping[str, float]]]
"""Held-out evaluation under this version; flat metric values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop runs on."""

    buffer: Buffer
    trainer: Trainer
    weights: WeightUpdater
    assemble: Assemble
    observer: Observer
    evaluate: Evaluate | None = None


class _Phases:
    """Seconds spent per phase of one step; each phase is announced to the observer."""

    def __init__(self, observer: Observer, step: int) -> None:
        self.seconds: dict[str, float] = {}
        self._observer, self._step = observer, step
        self._name, self._since = "", time.monotonic()

    def enter(self, name: str) -> None:
        now = time.monotonic()
        if self._name:
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        self._name, self._since = name, now
        if name:
            self._observer.phase(name, self._step)


async def run_loop(parts: Parts, *, num_steps: int, eval_interval: int = 0) -> WeightVersion:
    """Train `num_steps` batches; the version the fleet ends on. Raises what its parts raise."""
    version = WeightVersion(0)
    for step in range(1, num_steps + 1):
        phases = _Phases(parts.observer, step)
        phases.enter("rollout")
        taken = await parts.buffer.take()
        phases.enter("assemble")
        batch = parts.assemble(taken)
        phases.enter("train")
        result = await parts.trainer.train(batch)
        await parts.buffer.trained(taken.batch_id)
        phases.enter("sync")
        version = WeightVersion(version + 1)
        update = await parts.weights.run(version)
        await parts.buffer.release(version)
        await parts.buffer.advance(version)
        phases.enter("")
        values = {
            **resolve(rollout_metrics(taken), "rollout/"),
            **resolve(result.metrics, "train/"),
            **{f"train/time/{name}_s": value for name, value in result.seconds.items()},
            **resolve(await parts.buffer.metrics(), "buffer/"),
            **resolve(update_metrics(update), "sync/"),
            **resolve(time_metrics(phases.seconds, taken, batch.total_tokens), "time/"),
        }
        if parts.evaluate is not None and eval_interval and step % eval_interval == 0 and step < num_steps:
            parts.observer.phase("evaluate", step)
            values.update(await parts.evaluate(version))
        parts.observer.step(step, values)
    return version
