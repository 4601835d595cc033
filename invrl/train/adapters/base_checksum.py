"""The checksum of a base's weights, which names the base of an adapter.

It reads the whole model, which takes a minute for a large one. So a run keeps it in a
file, beside the names, sizes and times of change of the weight files that it is of.

Imports torch only where weights are touched.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import xxhash
from safetensors import safe_open

from invrl.host.files.disk import write_atomically
from invrl.user_code.model_folder import tensor_files


class _WeightFile(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    size: int
    changed_ns: int
    """Time of its last change."""


class _KeptChecksum(msgspec.Struct, frozen=True, kw_only=True):
    checksum: str
    files: tuple[_WeightFile, ...]


def weights_checksum(folder: Path) -> str:
    """Return the checksum of a model's weights: xxh3-128 of the names and bytes of its
    tensors in the order of their names, however they are divided into files."""
    from invrl.weights.tensors.tensor_spec import raw_bytes

    files = tensor_files(folder)
    opened = {file: safe_open(file, framework="pt") for file in set(files.values())}
    digest = xxhash.xxh3_128()
    for name, file in sorted(files.items()):
        digest.update(name.encode())
        digest.update(raw_bytes(opened[file].get_tensor(name)).numpy().data)
    return digest.hexdigest()


def kept_checksum(folder: Path, kept_in: Path) -> str:
    """Return `weights_checksum`, which is computed only if the file `kept_in` has none
    of these weight files. A file that cannot be read or written is as if there were
    none."""
    files = _weight_files(folder)
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        kept = msgspec.json.decode(kept_in.read_bytes(), type=_KeptChecksum)
        if kept.files == files:
            return kept.checksum
    checksum = weights_checksum(folder)
    with contextlib.suppress(OSError):
        kept = _KeptChecksum(checksum=checksum, files=files)
        write_atomically(kept_in, msgspec.json.encode(kept).decode())
    return checksum


def _weight_files(folder: Path) -> tuple[_WeightFile, ...]:
    entries: list[_WeightFile] = []
    for file in sorted(set(tensor_files(folder).values())):
        status = file.stat()
        entries.append(
            _WeightFile(
                name=str(file.resolve()),
                size=status.st_size,
                changed_ns=status.st_mtime_ns,
            )
        )
    return tuple(entries)
