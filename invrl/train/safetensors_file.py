"""Writes a safetensors file tensor by tensor.

`safetensors.torch.save_file` takes all tensors at once and turns each of them into bytes before it writes the
first: a second model stands in memory. It also makes the file readable by its owner alone, whatever the umask
says. Here one tensor at a time is copied, and the file has an ordinary mode.

The format is eight bytes with the length of the header (little-endian), the header as JSON, and the tensors'
bytes in the header's order (the safetensors package's own documentation, section "Format")."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from invrl.errors import TrainError
from invrl.interfaces import WeightLayout
from invrl.weights.tensor_spec import num_bytes, spec_of

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_ALIGNED = 8
"""Bytes; the first tensor begins at a multiple, as in the files of the reference implementation."""


def write_safetensors(path: Path, layout: WeightLayout, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """`tensors`: exactly those of the layout, in its order, on any device. The file is on disk on return.
    Raises TrainError where a tensor is not the one that the layout names, OSError."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in layout:
        begin = end
        end += num_bytes(spec)
        header[spec.name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for spec, (name, tensor) in zip(layout, tensors, strict=True):
            if spec_of(name, tensor) != spec:
                raise TrainError(f"{spec_of(name, tensor)} is written where the layout has {spec}")
            flat = tensor.detach().cpu().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
