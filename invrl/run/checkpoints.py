"""A run's checkpoints: one folder per step, whole or not there; and the newest weights by themselves.

    checkpoints/step-000004/   megatron/ (model, optimizer, schedule, RNG), hugging_face/ (the model),
                               buffer.json (buffer, data cursor, place in the ledger),
                               manifest.json (size and checksum of each of these files)
    checkpoints/model-000005/  the model alone, as a Hugging Face folder with a manifest.json

Either is written under another name, flushed to disk and renamed: a crash at any byte leaves the last whole
one. It is checked against its manifest before anything of it is loaded.

The model of a step is saved before its optimizer's state, which is six times as large. Where that cannot be
written (the disk is full, the memory is), `model-N` is left. It can be evaluated, served and trained anew;
no run goes on from it: it is no checkpoint. The checkpoint of the step takes it over once that is whole."""

import asyncio
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ParamSpec, Self, TypeVar

from invrl.errors import ConfigError, DamagedFileError
from invrl.host.disk import flush, flush_tree
from invrl.interfaces import Trainer
from invrl.store.manifest import MANIFEST_NAME, check_manifest, write_manifest
from invrl.store.run_folder import Below

P = ParamSpec("P")
T = TypeVar("T")

_PREFIX = "step-"
_MODEL_PREFIX = "model-"
_PARTIAL = ".partial"
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
        step = _step_in(path, _PREFIX)
        return None if step is None else cls(step=step, path=path)

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
        self.saved_step: int | None = None
        """Of the newest weights that this object has saved, whatever became of their checkpoint."""

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
        flush(self._folder)
        return aside

    def begin(self, step: int) -> Checkpoint:
        """An empty folder to fill; it is no checkpoint before `commit`."""
        self._clear_partial()
        filling = Checkpoint(step=step, path=self._folder / f"{_PREFIX}{step:06d}{_PARTIAL}")
        filling.path.mkdir(parents=True)
        return filling

    def commit(self, filled: Checkpoint) -> Checkpoint:
        """Writes the manifest, flushes everything, gives it its name, and removes the checkpoints that are
        not kept, and saved models that are not newer."""
        write_manifest(filled.path)
        flush_tree(filled.path)
        final = self._folder / f"{_PREFIX}{filled.step:06d}"
        self._rename(filled.path, final)
        for old in self.all()[: -self._keep] if self._keep else ():
            shutil.rmtree(old.path)
        self._remove_models(filled.step)
        return Checkpoint(step=filled.step, path=final)

    async def save(self, trainer: Trainer, step: int, snapshot: bytes | None = None) -> Checkpoint:
        """The trainer as it is, and the buffer's `snapshot` where there is one. The model comes first: it is
        left where the rest fails. The disk is left to threads: the caller's event loop watches processes
        meanwhile."""
        model = await self.save_model(trainer, step)
        filling = await _in_thread(self.begin, step)
        await trainer.save_checkpoint(str(filling.megatron))
        await _in_thread(_link_model, model, filling.hugging_face)
        if snapshot is not None:
            await _in_thread(filling.buffer.write_bytes, snapshot)
        return await _in_thread(self.commit, filling)

    async def save_model(self, trainer: Trainer, step: int) -> Path:
        """The trainer's weights alone, as a Hugging Face folder; older ones of these go. Its path."""
        final = self._folder / f"{_MODEL_PREFIX}{step:06d}"
        unfinished = final.with_name(final.name + _PARTIAL)
        await _in_thread(self._clear_partial)
        await trainer.export_hugging_face(str(unfinished))
        await _in_thread(self._publish_model, unfinished, final, step)
        return final

    def model_of(self, step: int) -> Path:
        """Where the weights of a step are that was saved, in its checkpoint or by themselves."""
        checkpoint = Checkpoint(step=step, path=self._folder / f"{_PREFIX}{step:06d}")
        if checkpoint.path.exists():
            return checkpoint.hugging_face
        return self._folder / f"{_MODEL_PREFIX}{step:06d}"

    def models(self) -> list[Path]:
        """The models that were saved without a checkpoint, or whose checkpoint is not whole; oldest first."""
        found = [path for path in self._folder.glob(f"{_MODEL_PREFIX}*") if model_step(path) is not None]
        return sorted(found)

    def newest_model(self) -> Path | None:
        """The folder of the newest weights, within a checkpoint or by itself. None before the first."""
        checkpoint = self.latest()
        model = next(reversed(self.models()), None)
        if model is not None and (checkpoint is None or (model_step(model) or 0) > checkpoint.step):
            return model
        return None if checkpoint is None else checkpoint.hugging_face

    def _publish_model(self, unfinished: Path, final: Path, step: int) -> None:
        write_manifest(unfinished)
        flush_tree(unfinished)
        self._rename(unfinished, final)
        self.saved_step = step
        self._remove_models(step - 1)

    def _rename(self, unfinished: Path, final: Path) -> None:
        """One that is there already is of an incarnation that is lost."""
        if final.exists():
            final.rename(final.with_name(f"{final.name}.old{_PARTIAL}"))
        unfinished.rename(final)
        flush(self._folder)
        self._clear_partial()

    def _remove_models(self, last: int) -> None:
        """Those of this step and of earlier ones. A later one is of an incarnation that came further."""
        for path in self.models():
            if (model_step(path) or 0) <= last:
                shutil.rmtree(path)

    def _clear_partial(self) -> None:
        for path in self._folder.glob(f"*{_PARTIAL}*"):
            shutil.rmtree(path)


async def _in_thread(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Beside the event loop. A cancellation waits for the thread, which would go on all the same: whoever
    cancelled may write into the same folder next."""
    loop = asyncio.get_running_loop()
    working = loop.run_in_executor(None, partial(work, *arguments, **named))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        raise


def model_step(path: Path) -> int | None:
    """The step whose weights this folder holds by themselves; None for another folder."""
    return _step_in(path, _MODEL_PREFIX)


def _step_in(path: Path, prefix: str) -> int | None:
    step = path.name.removeprefix(prefix)
    is_one = path.name.startswith(prefix) and step.isdecimal() and path.is_dir()
    return int(step) if is_one else None


def _link_model(model: Path, to: Path) -> None:
    """The same files under a second name, or copies where the file system has no such thing. The manifest of
    the checkpoint describes them."""
    to.mkdir()
    for file in model.iterdir():
        if file.name == MANIFEST_NAME:
            continue
        try:
            os.link(file, to / file.name)
        except OSError:
            shutil.copyfile(file, to / file.name)


def first_checkpoint(given: str) -> Checkpoint | None:
    """What `--load-checkpoint` names, not checked yet; None without it: the model folder is step 0. Raises
    ConfigError."""
    found = Checkpoint.at(Path(given).expanduser().absolute()) if given else None
    if given and (found is None or not found.megatron.is_dir()):
        fix = "give RUN/checkpoints/step-NNNNNN, with megatron/ in it"
        raise ConfigError("run.load_checkpoint", given, "not the folder of a checkpoint", fix)
    return found


def check_served(model_folder: Path) -> None:
    """Where `model_folder` was saved by a run, in a checkpoint or by itself, its files are what was written.
    Raises ConfigError. Another model folder has no manifest of ours, and nothing to compare with."""
    within = model_folder.name == "hugging_face"
    described = model_folder.parent if within else model_folder
    if not (described / MANIFEST_NAME).exists() or not (within or model_step(model_folder) is not None):
        return
    try:
        check_manifest(described, below=model_folder.name if within else "")
    except DamagedFileError as error:
        fix = "give another checkpoint of the run"
        raise ConfigError("model.model_path", str(model_folder), str(error), fix) from error
