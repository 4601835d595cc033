"""Writes a safetensors file tensor by tensor.

`safetensors.torch.save_file` takes all tensors at once and turns each of them into bytes before it writes the
first, so that a second model is in memory. It also makes the file readable by its owner alone, whatever the
umask says. Here one tensor at a time is copied, and the file has an ordinary mode.

The format is eight bytes with the length of the header (little-endian), the header as JSON, and the tensors'
bytes in the header's order (see the section "Format" of the safetensors package's documentation).
"""

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from invrl.errors import TrainError
from invrl.interfaces import WeightLayout
from invrl.store.checksummed_file import ChecksummedFile
from invrl.types import FileEntry
from invrl.weights.tensor_spec import num_bytes, spec_of

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Dtypes by torch's name -> the format's name."""
_ALIGNMENT = 8
"""Bytes. The first tensor begins at a multiple of it, as in the files of the reference implementation."""


def write_safetensors(
    path: Path, layout: WeightLayout, tensors: Iterable[tuple[str, torch.Tensor]]
) -> FileEntry:
    """Writes exactly the tensors of the layout, in its order, from any device. The file is on disk on return.
    Returns what was written.

    Raises OSError, and TrainError where a tensor is not the one that the layout names.
    """
    header = _header(layout)
    with ChecksummedFile(path) as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for spec, (name, tensor) in zip(layout, tensors, strict=True):
            if spec_of(name, tensor) != spec:
                raise TrainError(f"{spec_of(name, tensor)} is written where the layout has {spec}")
            flat = tensor.detach().cpu().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)
        file.sync()
        return file.entry()


def _header(layout: WeightLayout) -> bytes:
    """The header as JSON, padded with blanks."""
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
