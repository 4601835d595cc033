"""The rollouts of a step that the console shows (`run.log_samples`): a glance at what the model says, where
`invrl samples` shows all of it.

Invariant: what goes wrong here is logged and ends no run."""

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from invrl.observe.samples_text import brief
from invrl.observe.transcript import read_transcript
from invrl.store.run_store import RunStore
from invrl.types import RolloutSummary, TakenBatch

logger = logging.getLogger(__name__)


def show_samples(store_path: Path, count: int, step: int, taken: TakenBatch) -> list[str]:
    """A text for each of `count` rollouts of the step's batch."""
    rollouts = chosen_rollouts(taken, count, step)
    if not rollouts:
        return []
    try:
        # The caller may be a thread: a connection of its own.
        with contextlib.closing(RunStore(store_path)) as store:
            return [brief(one, read_transcript(store, one.session_id)) for one in rollouts]
    except Exception:
        logger.exception("the samples of step %d cannot be shown", step)
        return []


def chosen_rollouts(taken: TakenBatch, count: int, step: int) -> Sequence[RolloutSummary]:
    """At most `count`, evenly over the groups of the batch; in each step others of their groups."""
    rollouts = [rollout for group in taken.groups for rollout in group.rollouts_G]
    count = min(count, len(rollouts))
    return [rollouts[(at * len(rollouts) // count + step) % len(rollouts)] for at in range(count)]
