"""Folders of a run's versions of the weights, for the transports that write files.

Invariant: a folder appears under its name when its files are whole and on disk.
"""

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from invrl.errors import DiskFullError, LayoutError, TrainError, WeightSyncError
from invrl.host.files.disk import flush_tree, is_full
from invrl.types.weights import WeightVersion

_PREFIX = "version-"


def version_folder(parent: Path, version: WeightVersion) -> Path:
    return parent / f"{_PREFIX}{version:06d}"


def remove_versions(parent: Path, *, besides: Collection[Path] = ()) -> None:
    """Remove the versions' folders, and what a failed or killed writer left of one."""
    for folder in parent.glob(f"{_PREFIX}*"):
        if folder not in besides:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def writing_version(parent: Path, version: WeightVersion) -> Iterator[Path]:
    """Yield the folder to write the version's files into. It gets its name at the end
    of the block.

    Raises LayoutError for the block's TrainError or ValueError (another tensor, or too
    few or too many), and WeightSyncError if the files cannot be written: DiskFullError
    if there is no space.
    """
    folder = version_folder(parent, version)
    partial = folder.with_name(folder.name + ".partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        flush_tree(partial)
        partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = (
            f"the weights of version {version} cannot be written to {parent}: {error}. "
            "Two versions need room there (--weights.folder)"
        )
        if is_full(error):
            raise DiskFullError(reason) from error
        raise WeightSyncError(reason) from error
    except (TrainError, ValueError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise LayoutError(
            f"the tensors to stage are not those of the layout: {error}"
        ) from error
