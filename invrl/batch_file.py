"""A training batch as a file: what `--save-rollout-data` writes and `--load-rollout-data` reads.

One .npz per step: the rows of all samples end to end, their lengths, and the rest as JSON. Exact: what is
loaded equals what was saved bit for bit. Called by `training.py`, `train_only.py`, `replay.py`.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from invrl.errors import ConfigError
from invrl.types import TrainBatch, TrainSample, WeightVersion

_ARRAYS = ("tokens_T", "loss_mask_T", "rollout_logprobs_T", "versions_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _SampleRest:
    reward: float
    temperature: float
    group_id: str
    rollout_id: str
    attempt: int
    turn_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    """Everything of a batch but its arrays."""

    batch_id: int
    version: WeightVersion
    total_tokens: int
    total_rollouts: int
    total_samples: int
    samples: tuple[_SampleRest, ...]


def batch_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.npz"


def save_batch(path: Path, batch: TrainBatch) -> None:
    """Appears whole or not at all."""
    arrays: dict[str, NDArray[np.generic]] = {
        name: np.concatenate([getattr(sample, name) for sample in batch.samples] or [np.zeros(0)])
        for name in _ARRAYS
    }
    arrays["advantages_T"] = np.concatenate([*batch.advantages] or [np.zeros(0)])
    arrays["lengths"] = np.array([len(sample.tokens_T) for sample in batch.samples], np.int64)
    rest = msgspec.json.encode(msgspec.convert(batch, _Rest, from_attributes=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".partial")
    with new.open("wb") as file:
        np.savez_compressed(file, rest=np.frombuffer(rest, np.uint8), **arrays)  # type: ignore[arg-type]
    os.replace(new, path)


def load_batch(path: Path) -> TrainBatch:
    """Raises ConfigError if this is not such a file, or not a whole one."""
    try:
        with np.load(path) as file:
            rest = msgspec.json.decode(file["rest"].tobytes(), type=_Rest)
            cuts = np.cumsum(file["lengths"])[:-1]
            split = {name: np.split(file[name], cuts) for name in (*_ARRAYS, "advantages_T")}
        samples = tuple(
            TrainSample(**{name: split[name][at] for name in _ARRAYS}, **asdict(one))
            for at, one in enumerate(rest.samples)
        )
        fields = {name: getattr(rest, name) for name in _Rest.__slots__ if name != "samples"}
        return TrainBatch(**fields, samples=samples, advantages=tuple(split["advantages_T"][: len(samples)]))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, msgspec.MsgspecError) as error:
        fix = "give a folder that --save-rollout-data or --debug-rollout-only wrote"
        reason = f"not a whole batch file: {error}"
        raise ConfigError("run.load_rollout_data", str(path), reason, fix) from error


def saved_steps(folder: Path, *, after_step: int) -> list[int]:
    """The steps after `after_step` that have a file. Raises ConfigError if there are none, or a gap."""
    found = sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.npz"))
    steps = [step for step in found if step > after_step]
    if not steps or steps != list(range(after_step + 1, steps[-1] + 1)):
        reason = f"step {after_step + 1} is to come next, and there are batches of steps {found}"
        fix = "give a run's saved batches, and its checkpoint of the step before with --load-checkpoint"
        raise ConfigError("run.load_rollout_data", str(folder), reason, fix)
    return steps
