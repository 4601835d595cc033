"""The trainer's end of the weight transports `disk` and `adapter`: a folder per
version, on a disk that engines share.

Invariant: the version staged last stays while the next one is written, so that engines
can return to it and joining engines can load it. Remains of a killed writer are removed
at the start.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from invrl.interfaces import StagedWeights, WeightLayout
from invrl.train.weights.safetensors_file import write_safetensors
from invrl.train.weights.version_folders import (
    remove_versions,
    version_folder,
    writing_version,
)
from invrl.types.weights import WeightVersion
from invrl.weights.tensors.tensor_spec import checksum, num_bytes
from invrl.weights.transports.weight_folder import WEIGHTS_NAME


class WeightFolders:
    """Versions of the weights below `parent`, which holds nothing else."""

    def __init__(
        self,
        layout: WeightLayout,
        parent: Path,
        *,
        file_name: str = WEIGHTS_NAME,
        describe: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        """`file_name`: the name of the file with the tensors. `describe` writes the
        other files of a folder."""
        self._layout = layout
        self._parent = parent
        self._file_name = file_name
        self._describe = describe
        self._staged: list[WeightVersion] = []
        """Versions whose folders exist, in the order of staging."""
        remove_versions(parent)

    def stage(
        self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> StagedWeights:
        """Write the tensors of the layout, in its order, from any device. Raises
        LayoutError, and WeightSyncError if they cannot be written: DiskFullError if
        there is no space."""
        # The engines may have to return to the newest other version.
        others = [staged for staged in self._staged if staged != version]
        kept = others[-1:]
        remove_versions(
            self._parent,
            besides=[version_folder(self._parent, staged) for staged in kept],
        )
        self._staged = kept
        checksums: dict[str, str] = {}
        with writing_version(self._parent, version) as folder:
            self._describe(folder)
            write_safetensors(
                folder / self._file_name, self._layout, _hashed(tensors, checksums)
            )
        self._staged.append(version)
        return StagedWeights(
            version=version,
            handle=str(version_folder(self._parent, version)),
            checksums=checksums,
            num_bytes=sum(num_bytes(spec) for spec in self._layout),
        )


def _hashed(
    tensors: Iterable[tuple[str, torch.Tensor]], checksums: dict[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        checksums[name] = checksum(tensor)
        yield name, tensor
