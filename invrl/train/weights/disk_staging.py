"""The trainer's end of the weight transport `disk`: a folder per version, on a disk
that engines share.

Invariant: a folder appears under its name when its file is whole and on disk. The
version staged last stays while the next one is written, so that engines can return to
it and joining engines can load it. Remains of a killed writer are removed at the start.
"""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from invrl.errors import DiskFullError, LayoutError, TrainError, WeightSyncError
from invrl.host.files.disk import is_full
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.train.weights.safetensors_file import write_safetensors
from invrl.types.weights import WeightVersion
from invrl.weights.tensors.tensor_spec import checksum, num_bytes
from invrl.weights.transports.weight_folder import WEIGHTS_NAME

_PREFIX = "version-"


class WeightFolders:
    """Versions of the weights below `parent`, which holds nothing else."""

    def __init__(self, layout: WeightLayout, parent: Path) -> None:
        self._layout = layout
        self._parent = parent
        self._staged: list[WeightVersion] = []
        """Versions whose folders exist, in the order of staging."""
        for left in parent.glob(f"{_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)

    def stage(
        self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> StagedWeights:
        """Write the tensors of the layout, in its order, from any device. Raises
        LayoutError, and WeightSyncError if they cannot be written: DiskFullError if
        there is no space."""
        self._keep_newest_besides(version)
        folder = self._path(version)
        partial = folder.with_name(folder.name + ".partial")
        checksums: dict[str, str] = {}
        try:
            partial.mkdir(parents=True)
            write_safetensors(
                partial / WEIGHTS_NAME, self._layout, _hashed(tensors, checksums)
            )
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
        self._staged.append(version)
        return StagedWeights(
            version=version,
            handle=str(folder),
            checksums=checksums,
            num_bytes=sum(num_bytes(spec) for spec in self._layout),
        )

    def _keep_newest_besides(self, version: WeightVersion) -> None:
        """Remove every other version but the newest, to which the engines may have to
        return."""
        others = [staged for staged in self._staged if staged != version]
        kept = others[-1:]
        for staged in self._staged:
            if staged not in kept:
                shutil.rmtree(self._path(staged), ignore_errors=True)
        self._staged = kept

    def _path(self, version: WeightVersion) -> Path:
        return self._parent / f"{_PREFIX}{version:06d}"


def _hashed(
    tensors: Iterable[tuple[str, torch.Tensor]], checksums: dict[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        checksums[name] = checksum(tensor)
        yield name, tensor
