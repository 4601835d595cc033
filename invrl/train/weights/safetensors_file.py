"""Writes safetensors files tensor by tensor: one, or several with an index.

`safetensors.torch.save_file` takes all tensors at once and turns each of them into
bytes before it writes the first, so that a second model is in memory. It also makes the
file readable by its owner alone, whatever the umask. Here one tensor at a time is
copied, and the file has an ordinary mode.

The format is eight bytes with the length of the header (little-endian), the header as
JSON, and the tensors' bytes in the header's order (see the section "Format" of the
safetensors package's documentation).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch

from invrl.errors import TrainError
from invrl.interfaces import WeightLayout
from invrl.store.checksummed_file import ChecksummedFile
from invrl.types.file_entry import FileEntry
from invrl.types.weights import TensorSpec
from invrl.weights.tensors.tensor_spec import make_spec, num_bytes, raw_bytes

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Dtypes by torch's name -> the format's name."""
INDEX_NAME = "model.safetensors.index.json"
"""Index that names the file of each tensor, if there are several. transformers and
SGLang read it."""
_ALIGNMENT = 8
"""Bytes. The first tensor begins at a multiple of it, as in the files of the reference
implementation."""


def write_weights(
    folder: Path,
    layout: WeightLayout,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    max_shard_bytes: float,
) -> dict[str, FileEntry]:
    """Write the tensors of the layout, in its order, into files of at most
    `max_shard_bytes` (or of one larger tensor), under transformers' names. Returns
    entries by file name, without the index. Raises like `write_safetensors`."""
    shards = divide_into_shards(layout, max_shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        numbers = range(1, len(shards) + 1)
        names = [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in numbers
        ]
        (folder / INDEX_NAME).write_text(_index(names, shards), encoding="utf-8")
    remaining = iter(tensors)
    entries: dict[str, FileEntry] = {}
    for name, shard in zip(names, shards, strict=True):
        entries[name] = write_safetensors(
            folder / name, shard, islice(remaining, len(shard))
        )
    for name, _ in remaining:
        raise TrainError(f"{name} is not in the layout that is written")
    return entries


def divide_into_shards(layout: WeightLayout, max_bytes: float) -> list[WeightLayout]:
    """Divide the layout into consecutive parts of at most `max_bytes`, or of one larger
    tensor."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in layout:
        if shards[-1] and size + num_bytes(spec) > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += num_bytes(spec)
    return [tuple(shard) for shard in shards]


def _index(names: Sequence[str], shards: Sequence[WeightLayout]) -> str:
    """Return the index as JSON, as transformers writes it."""
    file_by_tensor: dict[str, str] = {}
    total_size = 0
    for name, shard in zip(names, shards, strict=True):
        for spec in shard:
            file_by_tensor[spec.name] = name
            total_size += num_bytes(spec)
    index = {
        "metadata": {"total_size": total_size},
        "weight_map": dict(sorted(file_by_tensor.items())),
    }
    return json.dumps(index, indent=2) + "\n"


def write_safetensors(
    path: Path, layout: WeightLayout, tensors: Iterable[tuple[str, torch.Tensor]]
) -> FileEntry:
    """Write exactly the tensors of the layout, in its order, from any device. The file
    is on disk on return. Returns its entry.

    Raises OSError, and TrainError if a tensor is not the one that the layout names.
    """
    header = _header(layout)
    with ChecksummedFile(path) as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for _, tensor in in_layout_order(layout, tensors):
            file.write(raw_bytes(tensor).numpy().data)
        file.sync()
        return file.entry()


def in_layout_order(
    layout: WeightLayout, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yield each tensor with its place in the layout. Raises TrainError if it has
    another one, ValueError for too few or too many."""
    for spec, (name, tensor) in zip(layout, tensors, strict=True):
        if make_spec(name, tensor) != spec:
            raise TrainError(
                f"{make_spec(name, tensor)} is written where the layout has {spec}"
            )
        yield spec, tensor


def _header(layout: WeightLayout) -> bytes:
    """Return the header as JSON, padded with blanks."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in layout:
        start = end
        end += num_bytes(spec)
        entries[spec.name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)
