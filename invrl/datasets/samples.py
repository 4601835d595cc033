"""Training samples of a data file's row: its tokens, and the numbers that an objective
needs.

| kind | samples of a row | `group_id` | `rollout_id` | `numbers` |
|---|---|---|---|---|
| conversations | one per trajectory | of the row | of the row | |
| pairs | chosen, rejected | of the row | of the side | `chosen`: 1 or 0 |
| labels | one | of the row | of the row | `desirable`: 1 or 0 |

So the partner of a pair's sample is the other sample of its group. A side of a pair,
and a labelled reply, is one trajectory: an objective compares sums over whole replies.
`group_id` also names the pass over the file, because a batch may hold a row of two
passes. Every trained token has advantage 1, log-prob 0 and version 0: no engine sampled
it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from invrl.datasets.config import Kind
from invrl.datasets.rows import DataRow
from invrl.datasets.trajectories import TokenizedTrajectory, stretches, trajectories
from invrl.errors import UnusableRowError
from invrl.gateway.rendering.renderer import Renderer
from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.weights import WeightVersion

CHOSEN = "chosen"
"""Number of a pair's samples: 1 on the chosen side, 0 on the rejected one."""
DESIRABLE = "desirable"
"""Number of a labelled sample: 1 for a good reply, 0 for a bad one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTokenizer:
    """Makes samples of rows. `max_tokens` limits one sample."""

    renderer: Renderer
    kind: Kind
    max_tokens: int
    overlong: Literal["skip", "truncate", "refuse"]

    def samples(self, row: DataRow, epoch: int = 0) -> list[TrainSample]:
        """Return the samples of a row in one pass over the file; none if it is too long
        and skipped. Raises UnusableRowError."""
        sides: list[list[TokenizedTrajectory]] = []
        for dialogue in row.sides:
            of_side = trajectories(self.renderer, dialogue)
            if self.kind != "conversations" and len(of_side) > 1:
                reason = (
                    f"the chat template writes the history anew for each of {len(of_side)} replies, and this "
                    "objective needs one sequence"
                )
                fix = "give only the last reply behind the prompt; with thinking, add --keep-thinking"
                raise UnusableRowError(reason, fix)
            sides.append(self._fitting(of_side))
        if not all(sides):
            return []
        return list(self._label(row, sides, f"{epoch}/{row.number}"))

    def shown(self, sample: TrainSample) -> str:
        """Return the text of a sample, with its trained parts in [[ ]]."""
        parts: list[str] = []
        for place in stretches(sample.loss_mask_T):
            text = self.renderer.decode(sample.tokens_T[place].tolist())
            parts.append(f"[[{text}]]" if sample.loss_mask_T[place.start] else text)
        return "".join(parts)

    def _fitting(self, of_side: list[TokenizedTrajectory]) -> list[TokenizedTrajectory]:
        """Leave out what is too long."""
        fitting: list[TokenizedTrajectory] = []
        for trajectory in of_side:
            num_tokens = len(trajectory.tokens_T)
            if num_tokens <= self.max_tokens:
                fitting.append(trajectory)
            elif self.overlong == "refuse":
                reason = (
                    f"it has {num_tokens} tokens, and {self.max_tokens} are the most"
                )
                fix = "shorten it, raise --max-sample-tokens, or set --data.overlong skip or truncate"
                raise UnusableRowError(reason, fix)
            elif (
                self.overlong == "truncate"
                and trajectory.trained_T[: self.max_tokens].any()
            ):
                cut = replace(
                    trajectory,
                    tokens_T=trajectory.tokens_T[: self.max_tokens],
                    trained_T=trajectory.trained_T[: self.max_tokens],
                )
                fitting.append(cut)
        return fitting

    def _label(
        self, row: DataRow, sides: list[list[TokenizedTrajectory]], name: str
    ) -> Iterator[TrainSample]:
        """Label the samples; `name` identifies the row in this pass."""
        if self.kind == "pairs":
            (chosen,), (rejected,) = sides
            yield _sample(
                chosen, group=name, rollout=f"{name}/chosen", numbers={CHOSEN: 1.0}
            )
            yield _sample(
                rejected, group=name, rollout=f"{name}/rejected", numbers={CHOSEN: 0.0}
            )
            return
        numbers = {}
        if row.label is not None:
            numbers = {DESIRABLE: float(row.label)}
        for trajectory in sides[0]:
            yield _sample(trajectory, group=name, rollout=name, numbers=numbers)


def _sample(
    trajectory: TokenizedTrajectory,
    *,
    group: str,
    rollout: str,
    numbers: dict[str, float],
) -> TrainSample:
    num_tokens = len(trajectory.tokens_T)
    return TrainSample(
        tokens_T=trajectory.tokens_T,
        loss_mask_T=trajectory.trained_T,
        rollout_logprobs_T=np.zeros(num_tokens, np.float32),
        versions_T=np.where(trajectory.trained_T, 0, -1).astype(np.int32),
        reward=0.0,
        temperature=1.0,
        group_id=group,
        rollout_id=rollout,
        attempt=0,
        turn_ids=(),
        numbers=numbers,
    )


def make_step_batch(samples: list[TrainSample], *, step: int) -> TrainBatch:
    """Return the batch that makes `step`."""
    return TrainBatch(
        batch_id=step,
        version=WeightVersion(max(0, step - 1)),
        samples=tuple(samples),
        advantages=tuple(sample.loss_mask_T.astype(np.float32) for sample in samples),
    )
