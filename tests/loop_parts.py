"""Parts of the training loop that only note what they are asked."""

from __future__ import annotations

from collections.abc import Mapping

from invrl.interfaces import StepResult
from invrl.observe.sinks.sinks import Sink
from invrl.types.batches import TakenBatch, TrainBatch
from invrl.types.file_entry import FileEntries
from invrl.types.leases import GroupLease
from invrl.types.metrics import Max, Metric
from invrl.types.rollouts import Outcome
from invrl.types.weights import WeightUpdate, WeightVersion


class Notes(Sink):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.rows: dict[int, Mapping[str, float]] = {}

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.rows[step] = values


class EmptyBatches:
    """A buffer whose batches hold no group; the versions that it was told."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def lease(self) -> GroupLease | None:
        return None

    async def record(self, outcome: Outcome) -> None: ...

    async def take(self) -> TakenBatch:
        return TakenBatch(
            batch_id=len(self.versions),
            version=WeightVersion(len(self.versions)),
            groups=(),
        )

    async def trained(self, batch_id: int) -> None: ...

    async def snapshot(self, trained: WeightVersion) -> bytes:
        return b""

    async def advance(self, version: WeightVersion) -> None:
        self.versions.append(version)

    async def metrics(self) -> Mapping[str, Metric]:
        return {}


class FixedSteps:
    """A trainer that makes so many optimizer steps of each batch."""

    def __init__(self, optimizer_steps: list[int]) -> None:
        self._steps = iter(optimizer_steps)

    async def train(self, batch: TrainBatch) -> StepResult:
        optimizer_steps = next(self._steps)
        return StepResult(
            optimizer_steps=optimizer_steps,
            nonfinite_steps=0,
            metrics={"skipped_steps": Max(1 - optimizer_steps)},
            seconds={},
        )

    async def save_checkpoint(self, path: str) -> FileEntries:
        return {}

    async def load_checkpoint(self, path: str) -> None: ...

    async def export_hugging_face(self, path: str) -> FileEntries:
        return {}


async def sync_at_once(version: WeightVersion) -> WeightUpdate:
    """A weight update of no bytes."""
    return WeightUpdate(
        version=version,
        num_bytes=0,
        seconds={},
        canary_max_gap=0.0,
        canary_mean_gap=0.0,
    )


async def save_nothing(step: int, snapshot: bytes) -> None: ...


def assemble_nothing(step: int, taken: TakenBatch) -> TrainBatch:
    """A batch without samples."""
    return TrainBatch(
        batch_id=taken.batch_id, version=taken.version, samples=(), advantages=()
    )
