"""A training batch as a file: what `--save-rollout-data` writes and `--load-rollout-data` reads.

One file per step: MessagePack, compressed, an array as its dtype and its bytes. Exact: what is loaded equals
what was saved bit for bit."""

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
    """The steps after `after_step` that have a file. Raises ConfigError if there are none, or a gap, or a
    file that is no step's."""
    numbers = {path: path.stem.removeprefix("step-") for path in sorted(folder.glob("step-*.batch"))}
    for path, number in numbers.items():
        if not number.isdecimal() or path != batch_path(folder, int(number)):
            reason = f"{path.name} is not the name of a step's batch"
            fix = f"move it away: batches are named {batch_path(folder, 1).name} and so on"
            raise ConfigError("run.load_rollout_data", str(folder), reason, fix)
    found = sorted(int(number) for number in numbers.values())
    steps = [step for step in found if step > after_step]
    if not steps or steps != list(range(after_step + 1, steps[-1] + 1)):
        reason = (
            f"step {after_step + 1} is to come next without a gap, and there are batches of steps {found}"
        )
        fix = "give a run's saved batches, and its checkpoint of the step before with --load-checkpoint"
        raise ConfigError("run.load_rollout_data", str(folder), reason, fix)
    return steps


def put_lost_aside(folder: Path, *, after_step: int) -> list[Path]:
    """A run goes on after `after_step`: batches of later steps were trained in an incarnation that is lost.
    They are renamed to end in `.lost`, so that nothing takes them for the run's; their new paths."""
    aside = []
    for path in sorted(folder.glob("step-*.batch")):
        number = path.stem.removeprefix("step-")
        if number.isdecimal() and int(number) > after_step:
            aside.append(path.replace(path.with_name(f"{path.name}.lost")))
    return aside
