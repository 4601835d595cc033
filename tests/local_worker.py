"""A rollout worker in the test's process, without its pool of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from invrl.rollout.config import RolloutConfig, WorkersConfig
from invrl.rollout.workers.runner import Runner
from invrl.rollout.workers.worker_actor import RolloutWorker, WorkerSettings


def worker_at(url: str, function: Callable[..., Any]) -> RolloutWorker:
    """A worker as after `ready`, of this function."""
    rollout = RolloutConfig(workers=WorkersConfig(memory_gb=None))
    worker = RolloutWorker(
        WorkerSettings(gateway_url=url, model="tiny", rollout=rollout)
    )
    worker._runner = Runner(function, None, timeout_s=600.0)
    worker._pool = None  # type: ignore[assignment]
    return worker
