"""What a repeated command says: anew, from a checkpoint, or finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from invrl.run.checkpoints.checkpoint import Checkpoint
from invrl.run.checkpoints.resume import Start, describe_start, is_finished
from invrl.store.run_folder import RunFolder


@pytest.mark.parametrize(
    ("step", "ended", "store", "told", "finished"),
    [
        (None, None, False, "a new run of 8 steps", False),
        (
            None,
            None,
            True,
            "ended before its first checkpoint: it starts again from step 0",
            False,
        ),
        (
            None,
            "8",
            True,
            "the run ended after step 8 without a checkpoint: it starts again",
            False,
        ),
        (6, None, True, "resuming from the checkpoint of step 6 of 8", False),
        (
            6,
            "6",
            True,
            "resuming from the checkpoint of step 6 of 8; the run had ended after step 6",
            False,
        ),
        (
            4,
            "4",
            True,
            "resuming from the checkpoint of step 4 of 8; the run had ended after step 4",
            False,
        ),
        (
            8,
            "8",
            True,
            "the run is finished: it has made its 8 steps. To continue it, raise --num-steps",
            True,
        ),
        (8, None, True, "resuming from the checkpoint of step 8 of 8", False),
        (9, "9", True, "the run is finished", True),
        (8, "not a number", True, "resuming from the checkpoint of step 8", False),
    ],
)
def test_incarnation_describes_its_starting_point(
    tmp_path: Path,
    step: int | None,
    ended: str | None,
    store: bool,
    told: str,
    finished: bool,
) -> None:
    folder = RunFolder(path=tmp_path)
    if ended is not None:
        folder.finished_path.write_text(ended)
    if store:
        folder.store_path.touch()
    checkpoint = (
        None
        if step is None
        else Checkpoint(step=step, path=tmp_path / f"step-{step:06d}")
    )
    start = Start(checkpoint=checkpoint)
    assert told in describe_start(folder, start, num_steps=8)
    assert is_finished(folder, start, num_steps=8) is finished
