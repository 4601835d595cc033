"""A folder with the weights of one version, for the weight transport `disk`.

The trainer's end, `train/weights/disk_staging.py`, makes it appear whole under its
name. An engine does not rely on that: it compares what it read with the trainer's
checksums. Imports torch only where tensors are touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from invrl.errors import LayoutError, WeightSyncError
from invrl.interfaces import WeightLayout
from invrl.weights.tensors.tensor_spec import make_spec
from invrl.weights.transports.weight_files import WeightFiles

if TYPE_CHECKING:
    import torch

WEIGHTS_NAME = "model.safetensors"


def read_folder(
    folder: str, layout: WeightLayout, files: WeightFiles | None = None
) -> Mapping[str, torch.Tensor]:
    """Return the folder's tensors as views of the mapped file. `files`: None for those
    on a disk.

    Raises WeightSyncError if the file is missing, cut or not a safetensors file,
    LayoutError unless its tensors are exactly those of the layout.
    """
    from safetensors import SafetensorError, safe_open

    path = (files or WeightFiles()).path(folder, WEIGHTS_NAME)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(
            f"the weights at {path} cannot be read: {error}"
        ) from error
    held = {name: make_spec(name, tensor) for name, tensor in tensors.items()}
    expected = {spec.name: spec for spec in layout}
    if held != expected:
        different = sorted(
            name
            for name in held.keys() | expected.keys()
            if held.get(name) != expected.get(name)
        )
        first = different[0]
        raise LayoutError(
            f"{first}: {path} has {held.get(first)}, the layout says {expected.get(first)}"
        )
    return tensors
