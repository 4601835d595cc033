"""The difference between a version of the weights and the previous one, as a folder:
the weight transport `delta`.

A chain is a folder with whole weights (`weight_folder.py`) and then folders with
differences, each from the folder before it. Every folder has a manifest with the
checksums of its version, so an engine finds its place in the chain by its own weights.
If it has none, it begins with the whole weights.

A difference is the exclusive or of the tensors' bytes: exact for every dtype. It is
stored byte plane by byte plane (first the lowest byte of every element, and so on) and
compressed with zstd: small steps change low bytes, and in bfloat16 few elements at all.
Imports torch only where tensors are touched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from invrl.errors import WeightSyncError
from invrl.interfaces import WeightLayout
from invrl.types.weights import TensorSpec
from invrl.weights.tensors.tensor_spec import checksum, num_bytes, raw_bytes
from invrl.weights.transports.weight_files import WeightFiles
from invrl.weights.transports.weight_folder import read_folder

if TYPE_CHECKING:
    import torch

DELTA_NAME = "delta.zst"
"""File with the differences of all tensors, one zstd frame after the other."""
MANIFEST_NAME = "manifest.json"
_COMPRESSION_LEVEL = 1


class DeltaHandle(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `StagedWeights.handle`, as JSON."""

    chain: tuple[str, ...]
    """Folders: whole weights first, the staged version last."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [start, start + length) of the file."""

    start: int
    length: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Manifest of a folder: each tensor's checksum, and the place of its difference."""

    checksums: dict[str, str]
    frames: dict[str, Frame] = {}
    """Empty in a folder with whole weights."""


def compress(difference: torch.Tensor, spec: TensorSpec) -> bytes:
    """Compress `difference`, the bytes of a tensor of this spec, into a frame."""
    import zstandard

    planes = _transposed(difference, rows=math.prod(spec.shape))
    return zstandard.ZstdCompressor(
        level=_COMPRESSION_LEVEL, write_checksum=True
    ).compress(planes.numpy().data)


def decompress(frame: bytes, spec: TensorSpec) -> torch.Tensor:
    """Decompress a frame of `compress`. Raises WeightSyncError if the frame has another
    size, is cut or was changed."""
    import torch
    import zstandard

    size = num_bytes(spec)
    try:
        planes = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
    except zstandard.ZstdError as error:
        raise WeightSyncError(
            f"the difference of {spec.name} cannot be read: {error}"
        ) from error
    if len(planes) != size:
        raise WeightSyncError(
            f"the difference of {spec.name} has {len(planes)} bytes, the tensor {size}"
        )
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    rows = size // math.prod(spec.shape)
    return _transposed(
        torch.frombuffer(bytearray(planes), dtype=torch.uint8), rows=rows
    )


def _transposed(flat: torch.Tensor, *, rows: int) -> torch.Tensor:
    """Transpose `flat` as a matrix with `rows` rows, and flatten it again."""
    if flat.numel() == 0:
        return flat
    return flat.view(rows, -1).t().contiguous().view(-1)


@dataclass(frozen=True)
class DeltaFolder:
    """Reader of one folder of a chain. Raises WeightSyncError if something in it cannot
    be read."""

    folder: str
    files: WeightFiles

    @cached_property
    def manifest(self) -> Manifest:
        body = self._read(MANIFEST_NAME)
        try:
            return msgspec.json.decode(body, type=Manifest)
        except msgspec.DecodeError as error:
            raise WeightSyncError(
                f"{self.folder}/{MANIFEST_NAME} cannot be read: {error}"
            ) from error

    def difference(self, spec: TensorSpec) -> torch.Tensor:
        """Return the bytes of the difference from the previous folder's version."""
        frame = self.manifest.frames.get(spec.name)
        if frame is None:
            raise WeightSyncError(f"{self.folder} has no difference of {spec.name}")
        return decompress(self._read(DELTA_NAME, frame.start, frame.length), spec)

    def _read(self, name: str, start: int = 0, length: int = -1) -> bytes:
        try:
            with self.files.path(self.folder, name).open("rb") as file:
                file.seek(start)
                return file.read(length)
        except OSError as error:
            raise WeightSyncError(
                f"{self.folder}/{name} cannot be read: {error}"
            ) from error


def load_chain(
    chain: Sequence[str],
    layout: WeightLayout,
    places: Mapping[str, torch.Tensor],
    files: WeightFiles | None = None,
) -> None:
    """Bring `places`, the engine's tensors by name, to the last version of the chain.
    `files`: None for those on a disk; only the needed ones are opened.

    Raises WeightSyncError or LayoutError before anything is written: every new tensor
    is computed twice, the first time only to compare its checksum, so that no second
    copy of the model is in memory.
    """
    files = files or WeightFiles()
    folders = [DeltaFolder(folder, files) for folder in chain]
    held = {name: checksum(place) for name, place in places.items()}
    known = [
        number
        for number, folder in enumerate(folders)
        if folder.manifest.checksums == held
    ]
    bases: Mapping[str, torch.Tensor] = places
    if not known:
        bases = read_folder(chain[0], layout, files)
    newer = folders[known[-1] + 1 if known else 1 :]

    def compute_tensor(spec: TensorSpec) -> torch.Tensor:
        """Compute the tensor of the last version."""
        base = bases[spec.name]
        if not newer:
            return base
        new_bytes = raw_bytes(base).clone()
        for folder in newer:
            new_bytes ^= folder.difference(spec)
        return new_bytes.view(base.dtype).view(base.shape)

    expected = folders[-1].manifest.checksums
    if known and not newer:
        return
    for spec in layout:
        if checksum(compute_tensor(spec)) != expected.get(spec.name):
            raise WeightSyncError(
                f"{spec.name}: {chain[-1]} does not lead to the checksum of its manifest"
            )
    for spec in layout:
        places[spec.name].copy_(compute_tensor(spec))
