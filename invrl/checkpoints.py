"""A run's checkpoints: one folder per step, whole or not there.

    checkpoints/step-000004/   megatron/ (model, optimizer, schedule, RNG), hugging_face/ (the model),
                               buffer.json (buffer, data cursor, place in the ledger)

A checkpoint is written under another name, flushed to disk and renamed: a crash at any byte leaves the last
whole one. Called by `training.py`."""

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from invrl.errors import ConfigError
from invrl.interfaces import Trainer
from invrl.run_folder import Below

_PREFIX, _PARTIAL = "step-", ".partial"


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
        """The checkpoint in this folder; None if it is not one."""
        step = path.name.removeprefix(_PREFIX)
        whole = path.name.startswith(_PREFIX) and step.isdecimal() and (path / "megatron").is_dir()
        return cls(step=int(step), path=path) if whole else None


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

    def begin(self, step: int) -> Checkpoint:
        """An empty folder to fill; it is no checkpoint before `commit`."""
        self._clear_partial()
        partial = Checkpoint(step=step, path=self._folder / f"{_PREFIX}{step:06d}{_PARTIAL}")
        partial.path.mkdir(parents=True)
        return partial

    def commit(self, filled: Checkpoint) -> Checkpoint:
        """Flushes what was written, gives it its name, and removes the checkpoints that are not kept."""
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
        """The trainer as it is, and the buffer's `snapshot` where there is one."""
        filling = self.begin(step)
        await trainer.save_checkpoint(str(filling.megatron))
        await trainer.export_hugging_face(str(filling.hugging_face))
        if snapshot is not None:
            filling.buffer.write_bytes(snapshot)
        return await asyncio.to_thread(self.commit, filling)

    def _clear_partial(self) -> None:
        for path in self._folder.glob(f"*{_PARTIAL}"):
            shutil.rmtree(path)


def first_checkpoint(given: str) -> Checkpoint | None:
    """What `--load-checkpoint` names; None without it: the model folder is step 0. ConfigError."""
    found = Checkpoint.at(Path(given).expanduser().absolute()) if given else None
    if given and found is None:
        fix = "give RUN/checkpoints/step-NNNNNN, with megatron/ in it"
        raise ConfigError("run.load_checkpoint", given, "not the folder of a checkpoint", fix)
    return found


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
