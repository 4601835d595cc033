"""The trainer's end of the weight transport `delta`: the changes since the previous
version, as a folder.

Invariant: a folder appears under its name when its files are whole and on disk. The
chains (`weights/transports/delta_folder.py`) of the version staged last and of its
predecessor are on disk; other folders are removed. Every n-th version is written whole,
as is one that follows a failure or is tried again.

Takes one copy of the weights in the memory of the rank that writes, to compare the next
version with.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch

from invrl.errors import DiskFullError, LayoutError, TrainError, WeightSyncError
from invrl.host.files.disk import is_full
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.train.weights.safetensors_file import write_safetensors
from invrl.types.weights import WeightVersion
from invrl.weights.tensors.tensor_spec import checksum, make_spec
from invrl.weights.transports.delta_folder import (
    DELTA_NAME,
    MANIFEST_NAME,
    DeltaHandle,
    Frame,
    Manifest,
    compress,
    raw_bytes,
)
from invrl.weights.transports.weight_folder import WEIGHTS_NAME

_PREFIX = "version-"
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
        for left in parent.glob(f"{_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)

    def stage(self, version: WeightVersion, tensors: _Tensors) -> StagedWeights:
        """Write the tensors of the layout, in its order, from any device. Raises
        LayoutError, and WeightSyncError if they cannot be written: DiskFullError if
        there is no space."""
        if version == self._version:  # a failed update is tried again
            self._base = {}
        else:
            self._chain_before = self._chain
        self._remove_besides(self._chain_before)
        base = self._base
        chain = list(self._chain_before)
        if not base or len(chain) >= self._full_every:
            base = {}
            chain = []
        self._version = None  # what follows may fail
        self._chain = self._chain_before
        self._base = {}
        folder = self._parent / f"{_PREFIX}{version:06d}"
        partial = folder.with_name(folder.name + ".partial")
        try:
            partial.mkdir(parents=True)
            write = self._write_difference if base else self._write_whole
            checksums = write(partial, tensors, base)
            written = sum(file.stat().st_size for file in partial.iterdir())
            partial.rename(folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            reason = (
                f"the weights of version {version} cannot be written to {self._parent}: {error}. "
                "Two versions need room there (--weights.folder)"
            )
            if is_full(error):
                raise DiskFullError(reason) from error
            raise WeightSyncError(reason) from error
        except (
            TrainError,
            ValueError,
        ) as error:  # another tensor, or too few or too many
            shutil.rmtree(partial, ignore_errors=True)
            raise LayoutError(
                f"the tensors to stage are not those of the layout: {error}"
            ) from error
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
        _write_synced(folder / MANIFEST_NAME, Manifest(checksums=checksums))
        return checksums

    def _write_difference(
        self, folder: Path, tensors: _Tensors, base: dict[str, torch.Tensor]
    ) -> dict[str, str]:
        """Write the changes, update `base` and return the checksums. Raises TrainError,
        ValueError."""
        checksums: dict[str, str] = {}
        frames: dict[str, Frame] = {}
        with (folder / DELTA_NAME).open("wb") as file:
            for spec, (name, tensor) in zip(self._layout, tensors, strict=True):
                if make_spec(name, tensor) != spec:
                    raise TrainError(
                        f"{make_spec(name, tensor)} is written where the layout has {spec}"
                    )
                new_bytes = raw_bytes(tensor)
                checksums[name] = checksum(tensor)
                frame = compress(base[name] ^ new_bytes, spec)
                base[name].copy_(new_bytes)
                frames[name] = Frame(file.tell(), len(frame))
                file.write(frame)
            file.flush()
            os.fsync(file.fileno())
        _write_synced(
            folder / MANIFEST_NAME, Manifest(checksums=checksums, frames=frames)
        )
        return checksums

    def _remove_besides(self, kept: list[Path]) -> None:
        for folder in self._parent.glob(f"{_PREFIX}*"):
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)


def _write_synced(path: Path, manifest: Manifest) -> None:
    with path.open("wb") as file:
        file.write(msgspec.json.encode(manifest))
        file.flush()
        os.fsync(file.fileno())
