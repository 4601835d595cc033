"""Continues the traces of a step's turns: their batch, the step that trained them, and
the first weight version that contains them.

The gateway recorded the trace of each turn in the run's store (`turn_traces`). Each
turn gets three spans, which complete its trace.
"""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from invrl.host.output.traces import Traces
from invrl.store.run_store import RunStore
from invrl.types.batches import TrainBatch

logger = logging.getLogger(__name__)
Times = Mapping[str, tuple[float, float]]
"""Start and end of each phase of a step, in Unix seconds."""


@dataclass(frozen=True, slots=True)
class StepTraces:
    """Traces of one run."""

    traces: Traces
    store_path: Path

    def add(self, step: int, batch: TrainBatch, times: Times) -> None:
        """Add the spans of a step that has been trained and sent to the engines, for
        each turn of the batch that has a trace. `times`: of the phases `assemble`,
        `train` and `sync`. Any thread may call this. An error is only logged: the run
        does not need its traces."""
        try:
            self._add(step, batch, times)
        except Exception:
            logger.exception("the traces of step %d are not complete", step)

    def _add(self, step: int, batch: TrainBatch, times: Times) -> None:
        turn_ids = {turn_id for sample in batch.samples for turn_id in sample.turn_ids}
        with contextlib.closing(RunStore(self.store_path)) as store:
            places = store.turn_traces(sorted(turn_ids))
        for turn_id, place in places.items():
            attributes = {
                "invrl.turn": turn_id,
                "invrl.step": step,
                "invrl.batch": batch.batch_id,
            }
            parent = place
            for name, phase in (
                ("batch", "assemble"),
                ("train_step", "train"),
                ("weight_version", "sync"),
            ):
                if name == "weight_version":
                    attributes = {**attributes, "invrl.weight_version": step}
                start, end = times[phase]
                parent = self.traces.past_span(
                    name, parent, start=start, end=end, attributes=attributes
                )
