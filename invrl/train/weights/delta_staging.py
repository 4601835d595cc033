"""The trainer's end of the weight transport `delta`: the changes since the previous
version, as a folder.

Invariant: the chains (`weights/transports/delta_folder.py`) of the version staged last
and of its predecessor are on disk; other folders are removed. Every n-th version is
written whole, as is one that follows a failure or is tried again.

Takes one copy of the weights in the memory of the rank that writes, to compare the next
version with.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch

from invrl.interfaces import StagedWeights, WeightLayout
from invrl.train.weights.safetensors_file import in_layout_order, write_safetensors
from invrl.train.weights.version_folders import (
    remove_versions,
    version_folder,
    writing_version,
)
from invrl.types.weights import WeightVersion
from invrl.weights.tensors.tensor_spec import checksum, raw_bytes
from invrl.weights.transports.delta_folder import (
    DELTA_NAME,
    MANIFEST_NAME,
    DeltaHandle,
    Frame,
    Manifest,
    compress,
)
from invrl.weights.transports.weight_folder import WEIGHTS_NAME

_Tensors = Iterable[tuple[str, torch.Tensor]]


class DeltaFolders:
    """Chains of folders below `parent`, which holds nothing else. `full_every` is the
    length of a chain."""

    def __init__(self, layout: WeightLayout, parent: Path, *, full_every: int) -> None:
        self._layout = layout
        self._parent = parent
        self._full_every = full_every
        self._version: WeightVersion | None = None
        """Version staged last. None if that failed."""
        self._chain: list[Path] = []
        """Chain of the newest version on disk."""
        self._chain_before: list[Path] = []
        """Chain of the previous version, to which engines may have to return."""
        self._base: dict[str, torch.Tensor] = {}
        """Bytes of the version staged last. Empty: the next one is written whole."""
        remove_versions(parent)

    def stage(self, version: WeightVersion, tensors: _Tensors) -> StagedWeights:
        """Write the tensors of the layout, in its order, from any device. Raises
        LayoutError, and WeightSyncError if they cannot be written: DiskFullError if
        there is no space."""
        if version == self._version:  # a failed update is tried again
            self._base = {}
        else:
            self._chain_before = self._chain
        remove_versions(self._parent, besides=self._chain_before)
        base = self._base
        chain = list(self._chain_before)
        if not base or len(chain) >= self._full_every:
            base = {}
            chain = []
        self._version = None  # what follows may fail
        self._chain = self._chain_before
        self._base = {}
        with writing_version(self._parent, version) as partial:
            write = self._write_difference if base else self._write_whole
            checksums = write(partial, tensors, base)
            written = sum(file.stat().st_size for file in partial.iterdir())
        folder = version_folder(self._parent, version)
        self._version = version
        self._chain = [*chain, folder]
        self._base = base
        handle = DeltaHandle(chain=tuple(str(path) for path in self._chain))
        return StagedWeights(
            version=version,
            handle=msgspec.json.encode(handle).decode(),
            checksums=checksums,
            num_bytes=written,
        )

    def _write_whole(
        self, folder: Path, tensors: _Tensors, base: dict[str, torch.Tensor]
    ) -> dict[str, str]:
        """Write all tensors, fill `base` and return the checksums."""
        checksums: dict[str, str] = {}

        def kept() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                base[name] = raw_bytes(tensor).clone()
                checksums[name] = checksum(tensor)
                yield name, tensor

        write_safetensors(folder / WEIGHTS_NAME, self._layout, kept())
        _write_manifest(folder, Manifest(checksums=checksums))
        return checksums

    def _write_difference(
        self, folder: Path, tensors: _Tensors, base: dict[str, torch.Tensor]
    ) -> dict[str, str]:
        """Write the changes, update `base` and return the checksums. Raises TrainError,
        ValueError."""
        checksums: dict[str, str] = {}
        frames: dict[str, Frame] = {}
        with (folder / DELTA_NAME).open("wb") as file:
            for spec, tensor in in_layout_order(self._layout, tensors):
                name = spec.name
                new_bytes = raw_bytes(tensor)
                checksums[name] = checksum(tensor)
                frame = compress(base[name] ^ new_bytes, spec)
                base[name].copy_(new_bytes)
                frames[name] = Frame(file.tell(), len(frame))
                file.write(frame)
        _write_manifest(folder, Manifest(checksums=checksums, frames=frames))
        return checksums


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
