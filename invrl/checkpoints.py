"""A run's checkpoints: one folder per step, whole or not there.

    checkpoints/step-000004/   megatron/ (model, optimizer, schedule, RNG), hugging_face/ (the model),
                               buffer.json (buffer, data cursor, place in the ledger),
                               manifest.json (size and checksum of each of these files)

A checkpoint is written under another name, flushed to disk and renamed: a crash at any byte leaves the last
whole one. It is checked against its manifest before anything of it is loaded."""

import asyncio
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from invrl.errors import ConfigError, DamagedFileError
from invrl.interfaces import Trainer
from invrl.manifest import MANIFEST_NAME, check_manifest, write_manifest
from invrl.run_folder import Below

_PREFIX, _PARTIAL = "step-", ".partial"
_DAMAGED = ".damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Paths of one checkpoint; `step` training steps had been made, so it holds weight version `step`."""

    step: int
    path: Path

    megatron = Below("megatron")
    hugging_face = Below("hugging_face")
    buffer = Below("buffer.json")
    """Absent where no buffer was in the run (`--debug-train-only`)."""

    @classmethod
    def at(cls, path: Path) -> Self | None:
        """The checkpoint in this folder, checked or not; None if it is not one."""
        step = path.name.removeprefix(_PREFIX)
        is_one = path.name.startswith(_PREFIX) and step.isdecimal() and path.is_dir()
        return cls(step=int(step), path=path) if is_one else None

    def check(self) -> None:
        """Raises DamagedFileError if a file is not what was written."""
        check_manifest(self.path)
        if not self.megatron.is_dir():
            raise DamagedFileError(self.megatron, "it is missing")


class Checkpoints:
    """Those of one run, in `folder`. `keep`: how many of the newest stay; 0 keeps all."""

    def __init__(self, folder: Path, *, keep: int = 0) -> None:
        self._folder = folder
        self._keep = keep

    def all(self) -> list[Checkpoint]:
        """Oldest first."""
        found = (Checkpoint.at(path) for path in self._folder.glob(f"{_PREFIX}*"))
        return sorted((one for one in found if one is not None), key=lambda one: one.step)

    def latest(self) -> Checkpoint | None:
        return next(reversed(self.all()), None)

    def newest_whole(self, report: Callable[[str], object]) -> Checkpoint | None:
        """The newest checkpoint whose files are what was written; None in a run that has not made one.
        Damaged ones are renamed, and `report` is told which file was wrong and which steps are lost.
        Raises DamagedFileError if there were checkpoints and none is whole."""
        for checkpoint in reversed(self.all()):
            try:
                checkpoint.check()
            except DamagedFileError as error:
                aside = self._put_aside(checkpoint)
                older = [one for one in self.all() if one.step < checkpoint.step]
                lost = f"Steps {older[-1].step + 1} to {checkpoint.step}" if older else "All its steps"
                report(
                    f"the checkpoint of step {checkpoint.step} is damaged: {error.path.name}: "
                    f"{error.reason}. It is kept as {aside.name}. {lost} are lost and made again"
                )
                continue
            return checkpoint
        damaged = sorted(path.name for path in self._folder.glob(f"{_PREFIX}*{_DAMAGED}*"))
        if damaged:
            fix = (
                "copy a whole checkpoint back to this folder, or begin a new run under another --run-name. "
                "A hugging_face folder in a damaged checkpoint may still serve as its --model-path"
            )
            reason = f"no checkpoint is whole; damaged ones: {', '.join(damaged)}"
            raise DamagedFileError(self._folder, reason, fix)
        return None

    def _put_aside(self, checkpoint: Checkpoint) -> Path:
        """Under a name that is no checkpoint's and was not used before."""
        aside = checkpoint.path.with_name(checkpoint.path.name + _DAMAGED)
        number = 1
        while aside.exists():
            number += 1
            aside = checkpoint.path.with_name(f"{checkpoint.path.name}{_DAMAGED}-{number}")
        checkpoint.path.rename(aside)
        _flush(self._folder)
        return aside

    def begin(self, step: int) -> Checkpoint:
        """An empty folder to fill; it is no checkpoint before `commit`."""
        self._clear_partial()
        partial = Checkpoint(step=step, path=self._folder / f"{_PREFIX}{step:06d}{_PARTIAL}")
        partial.path.mkdir(parents=True)
        return partial

    def commit(self, filled: Checkpoint) -> Checkpoint:
        """Writes the manifest, flushes everything, gives it its name, and removes the checkpoints that are
        not kept."""
        write_manifest(filled.path)
        for path in (*filled.path.rglob("*"), filled.path):
            _flush(path)
        final = self._folder / f"{_PREFIX}{filled.step:06d}"
        if final.exists():  # of a life that is lost
            final.rename(final.with_name(f"{final.name}.old{_PARTIAL}"))
        filled.path.rename(final)
        _flush(self._folder)
        self._clear_partial()
        for old in self.all()[: -self._keep] if self._keep else ():
            shutil.rmtree(old.path)
        return Checkpoint(step=filled.step, path=final)

    async def save(self, trainer: Trainer, step: int, snapshot: bytes | None = None) -> Checkpoint:
        """The trainer as it is, and the buffer's `snapshot` where there is one. The disk is left to threads:
        the caller's event loop watches processes meanwhile."""
        filling = await asyncio.to_thread(self.begin, step)
        await trainer.save_checkpoint(str(filling.megatron))
        await trainer.export_hugging_face(str(filling.hugging_face))
        if snapshot is not None:
            await asyncio.to_thread(filling.buffer.write_bytes, snapshot)
        return await asyncio.to_thread(self.commit, filling)

    def _clear_partial(self) -> None:
        for path in self._folder.glob(f"*{_PARTIAL}"):
            shutil.rmtree(path)


def first_checkpoint(given: str) -> Checkpoint | None:
    """What `--load-checkpoint` names, not checked yet; None without it: the model folder is step 0. Raises
    ConfigError."""
    found = Checkpoint.at(Path(given).expanduser().absolute()) if given else None
    if given and (found is None or not found.megatron.is_dir()):
        fix = "give RUN/checkpoints/step-NNNNNN, with megatron/ in it"
        raise ConfigError("run.load_checkpoint", given, "not the folder of a checkpoint", fix)
    return found


def check_served(model_folder: Path) -> None:
    """Where `model_folder` is the hugging_face folder of a checkpoint, its files are what was written. Raises
    ConfigError. Another model folder has no manifest, and nothing to compare with."""
    checkpoint = model_folder.parent
    if model_folder.name == "hugging_face" and (checkpoint / MANIFEST_NAME).exists():
        try:
            check_manifest(checkpoint, below=model_folder.name)
        except DamagedFileError as error:
            fix = "give another checkpoint of the run"
            raise ConfigError("model.model_path", str(model_folder), str(error), fix) from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
