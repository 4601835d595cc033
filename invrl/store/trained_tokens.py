"""The advantage of each sampled token in each training step, and the trainer's log-prob
of it.

There is one file per step, whole or absent: NumPy's .npz with the turns' arrays one
after the other. Invariant: a turn's arrays have one entry for each token that it
sampled, in order.
"""

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from invrl.errors import RunStoreError
from invrl.host.files.disk import replacing

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedTurn:
    """A turn with a trained token in a step. N: the tokens that it sampled."""

    turn_id: str
    trained_N: NDArray[np.bool_]
    advantages_N: NDArray[np.float32]
    """0 at untrained tokens."""
    logprobs_N: NDArray[np.float32]
    """The trainer's, in nats, at the temperature of the sample: under the policy before
    the step where that was computed, else from the trained pass. NaN where there is
    none."""


def tokens_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.npz"


def write_trained_tokens(folder: Path, step: int, turns: Sequence[TrainedTurn]) -> None:
    """Write the file of a step, replacing an earlier one. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [len(turn.trained_N) for turn in turns]
    with replacing(tokens_path(folder, step)) as new, new.open("wb") as file:
        np.savez_compressed(
            file,
            format=np.int64(FORMAT),
            turn_ids=np.array([turn.turn_id for turn in turns], np.str_),
            offsets=np.cumsum([0, *lengths], dtype=np.int64),
            trained=_joined([turn.trained_N for turn in turns], np.bool_),
            advantages=_joined([turn.advantages_N for turn in turns], np.float32),
            logprobs=_joined([turn.logprobs_N for turn in turns], np.float32),
        )


def _joined(
    arrays: Sequence[NDArray[np.generic]], dtype: type[np.generic]
) -> NDArray[np.generic]:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)


def read_trained_tokens(folder: Path, step: int) -> Mapping[str, TrainedTurn]:
    """Return the turns of a step by id; none if the step has no file. Raises
    RunStoreError for a file that is damaged or of a later version."""
    path = tokens_path(folder, step)
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            version = int(arrays["format"])
            if version != FORMAT:
                raise RunStoreError(
                    f"{path}: a later version of invrl wrote it (format {version}; this version has {FORMAT})"
                )
            turn_ids = arrays["turn_ids"].astype(np.str_)
            offsets = arrays["offsets"].astype(np.int64)
            trained = arrays["trained"].astype(np.bool_)
            advantages = arrays["advantages"].astype(np.float32)
            logprobs = arrays["logprobs"].astype(np.float32)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise RunStoreError(f"{path} is damaged: {error}") from error
    num_tokens = len(trained)
    fits = len(offsets) == len(turn_ids) + 1 and len(advantages) == num_tokens == len(
        logprobs
    )
    if (
        not fits
        or offsets[0] != 0
        or offsets[-1] != num_tokens
        or (np.diff(offsets) < 0).any()
    ):
        raise RunStoreError(f"{path} is damaged: its arrays do not fit together")
    turns: dict[str, TrainedTurn] = {}
    for place, turn_id in enumerate(turn_ids.tolist()):
        part = slice(int(offsets[place]), int(offsets[place + 1]))
        turns[turn_id] = TrainedTurn(
            turn_id=turn_id,
            trained_N=trained[part],
            advantages_N=advantages[part],
            logprobs_N=logprobs[part],
        )
    return turns


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps that have a file, ascending."""
    steps: list[int] = []
    for path in folder.glob("step-*.npz"):
        number = path.stem.removeprefix("step-")
        if number.isdecimal():
            steps.append(int(number))
    return sorted(steps)


def forget_steps(folder: Path, *, after_step: int) -> None:
    """Remove the files of later steps than the one that a run resumes from: those steps
    are lost. Raises OSError."""
    for step in recorded_steps(folder):
        if step > after_step:
            tokens_path(folder, step).unlink(missing_ok=True)
