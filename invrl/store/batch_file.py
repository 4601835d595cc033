"""A training batch as a file: `--save-rollout-data` writes it and `--load-rollout-data`
reads it.

There is one file per step: compressed MessagePack, in which an array is its dtype, its
bytes and its shape. A loaded batch equals the saved one, bit for bit.
"""

import zlib
from pathlib import Path

import msgspec
import numpy as np

from invrl.errors import ConfigError
from invrl.host.files.disk import replacing
from invrl.types.batches import TrainBatch


def batch_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.batch"


def save_batch(path: Path, batch: TrainBatch) -> None:
    """Write the file atomically: whole or not at all. Raises OSError."""
    content = msgspec.msgpack.encode(batch, enc_hook=_encode_array)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        new.write_bytes(zlib.compress(content))


def load_batch(path: Path) -> TrainBatch:
    """Load a batch. Raises ConfigError if the file cannot be read, is damaged, or is
    not a batch."""
    try:
        content = zlib.decompress(path.read_bytes())
        return msgspec.msgpack.decode(content, type=TrainBatch, dec_hook=_decode_array)
    except (OSError, zlib.error, msgspec.MsgspecError) as error:
        fix = "give a folder that --save-rollout-data or --debug-rollout-only wrote"
        reason = f"not a whole batch file: {error}"
        raise ConfigError("run.load_rollout_data", str(path), reason, fix) from error


def _encode_array(array: np.ndarray) -> tuple[str, bytes, *tuple[int, ...]]:
    """Return dtype, content, and the sizes of all axes but the first."""
    return array.dtype.str, array.tobytes(), *array.shape[1:]


def _decode_array(_: type, encoded: tuple[str, bytes, *tuple[int, ...]]) -> np.ndarray:
    dtype, content, *later_axes = encoded
    # a copy: torch needs arrays that can be written
    flat = np.frombuffer(bytearray(content), dtype)
    return flat.reshape(-1, *later_axes)


def saved_steps(folder: Path, *, after_step: int) -> list[int]:
    """Return the steps after `after_step` that have a file. Raises ConfigError if there
    is none, if a step is missing between them, or if a batch file is not named after a
    step."""
    all_steps: list[int] = []
    for path in sorted(folder.glob("step-*.batch")):
        step = _step_in_name(path)
        if step is None or path != batch_path(folder, step):
            reason = f"{path.name} is not the name of a step's batch"
            fix = f"move it away: batches are named {batch_path(folder, 1).name} and so on"
            raise ConfigError("run.load_rollout_data", str(folder), reason, fix)
        all_steps.append(step)
    all_steps.sort()
    steps = [step for step in all_steps if step > after_step]
    if not steps or steps != list(range(after_step + 1, steps[-1] + 1)):
        reason = f"the next batch must be that of step {after_step + 1}, and no step may be missing after it; "
        reason += f"there are batches of steps {all_steps}"
        fix = "give a run's saved batches, and its checkpoint of the step before with --load-checkpoint"
        raise ConfigError("run.load_rollout_data", str(folder), reason, fix)
    return steps


def rename_lost_batches(folder: Path, *, after_step: int) -> list[Path]:
    """Rename the batches of steps after `after_step`, which a run resumes from, and
    return their new paths. They were trained in an incarnation that is lost. Their
    names end in `.lost`, so that nothing mistakes them for batches of the run."""
    lost_paths = []
    for path in sorted(folder.glob("step-*.batch")):
        step = _step_in_name(path)
        if step is not None and step > after_step:
            lost_paths.append(path.replace(path.with_name(f"{path.name}.lost")))
    return lost_paths


def _step_in_name(path: Path) -> int | None:
    """Return the step in the name of a batch file; None without a number."""
    number = path.stem.removeprefix("step-")
    if not number.isdecimal():
        return None
    return int(number)
