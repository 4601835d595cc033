"""A training batch as a file: what `--save-rollout-data` writes and `--load-rollout-data` reads.

One file per step: MessagePack, compressed, an array as its dtype and its bytes. Exact: what is loaded equals
what was saved bit for bit. Called by `training.py`, `replay.py`."""

import os
import zlib
from pathlib import Path

import msgspec
import numpy as np

from invrl.errors import ConfigError
from invrl.types import TrainBatch


def batch_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.batch"


def save_batch(path: Path, batch: TrainBatch) -> None:
    """Appears whole or not at all."""

    def saved(array: np.ndarray) -> tuple[str, bytes]:
        assert array.ndim == 1, "every array of a batch has one axis"
        return array.dtype.str, array.tobytes()

    content = msgspec.msgpack.encode(batch, enc_hook=saved)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".partial")
    new.write_bytes(zlib.compress(content))
    os.replace(new, path)


def load_batch(path: Path) -> TrainBatch:
    """Raises ConfigError if this is not such a file, or not a whole one."""

    def array(_: type, saved: tuple[str, bytes]) -> np.ndarray:
        return np.frombuffer(bytearray(saved[1]), saved[0])  # a copy: torch wants arrays that can be written

    try:
        return msgspec.msgpack.decode(zlib.decompress(path.read_bytes()), type=TrainBatch, dec_hook=array)
    except (OSError, zlib.error, msgspec.MsgspecError) as error:
        fix = "give a folder that --save-rollout-data or --debug-rollout-only wrote"
        reason = f"not a whole batch file: {error}"
        raise ConfigError("run.load_rollout_data", str(path), reason, fix) from error


def saved_steps(folder: Path, *, after_step: int) -> list[int]:
    """The steps after `after_step` that have a file. Raises ConfigError if there are none, or a gap."""
    found = sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.batch"))
    steps = [step for step in found if step > after_step]
    if not steps or steps != list(range(after_step + 1, steps[-1] + 1)):
        reason = f"step {after_step + 1} is to come next, and there are batches of steps {found}"
        fix = "give a run's saved batches, and its checkpoint of the step before with --load-checkpoint"
        raise ConfigError("run.load_rollout_data", str(folder), reason, fix)
    return steps
