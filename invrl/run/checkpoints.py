"""A run's checkpoints: one folder per step, whole or not there; and the newest weights by themselves.

    checkpoints/step-000004/   megatron/ (model, optimizer, schedule, RNG), hugging_face/ (the model),
                               buffer.json (buffer, data cursor, place in the ledger),
                               manifest.json (size and checksum of each of these files)
    checkpoints/model-000005/  the model alone, as a Hugging Face folder with a manifest.json

Each is written under another name, flushed to disk and renamed, so a crash at any byte leaves the last whole
one. A checkpoint is checked against its manifest before anything of it is loaded.

The model of a step is saved before the optimizer's state, which is six times as large. If that state
cannot be written (the disk or the memory is full), `model-N` remains. It is not a checkpoint: it can be
evaluated, served and be the model of a new run, but no run resumes from it. Once the checkpoint of the
step is whole, `model-N` is removed."""

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
        """The checkpoint in this folder, not checked; None if the folder is not a checkpoint."""
        step = _step_in(path, _PREFIX)
        if step is None:
            return None
        return cls(step=step, path=path)

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
        checkpoints: list[Checkpoint] = []
        for path in self._folder.glob(f"{_PREFIX}*"):
            checkpoint = Checkpoint.at(path)
            if checkpoint is not None:
                checkpoints.append(checkpoint)
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)

    def latest(self) -> Checkpoint | None:
        checkpoints = self.all()
        if not checkpoints:
            return None
        return checkpoints[-1]

    def newest_whole(self, report: Callable[[str], object]) -> Checkpoint | None:
        """The newest checkpoint whose files are what was written; None if the run has made no checkpoint.
        Damaged checkpoints are renamed; `report` receives which file was wrong and which steps are lost.
        Raises DamagedFileError if there were checkpoints and none is whole."""
        for checkpoint in reversed(self.all()):
            try:
                checkpoint.check()
            except DamagedFileError as error:
                renamed = self._put_aside(checkpoint)
                older = [other for other in self.all() if other.step < checkpoint.step]
                lost_steps = "All its steps"
                if older:
                    lost_steps = f"Steps {older[-1].step + 1} to {checkpoint.step}"
                report(
                    f"the checkpoint of step {checkpoint.step} is damaged: {error.path.name}: "
                    f"{error.reason}. It is kept as {renamed.name}. {lost_steps} are lost and made again"
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
        """Renames it, to a name that no checkpoint has and that was not used before."""
        renamed = checkpoint.path.with_name(f"{checkpoint.path.name}{_DAMAGED}")
        number = 1
        while renamed.exists():
            number += 1
            renamed = checkpoint.path.with_name(f"{checkpoint.path.name}{_DAMAGED}-{number}")
        checkpoint.path.rename(renamed)
        flush(self._folder)
        return renamed

    def begin(self, step: int) -> Checkpoint:
        """An empty folder to fill. It becomes a checkpoint by `commit`."""
        self._clear_partial()
        filling = Checkpoint(step=step, path=self._folder / f"{_PREFIX}{step:06d}{_PARTIAL}")
        filling.path.mkdir(parents=True)
        return filling

    def commit(self, filled: Checkpoint) -> Checkpoint:
        """Writes the manifest, flushes everything and gives the folder its name. Then removes checkpoints
        that are not kept, and saved models that are not newer."""
        write_manifest(filled.path)
        flush_tree(filled.path)
        final = self._folder / f"{_PREFIX}{filled.step:06d}"
        self._rename(filled.path, final)
        if self._keep:
            for old in self.all()[: -self._keep]:
                shutil.rmtree(old.path)
        self._remove_models(filled.step)
        return Checkpoint(step=filled.step, path=final)

    async def save(self, trainer: Trainer, step: int, snapshot: bytes | None = None) -> Checkpoint:
        """Saves the trainer as it is, and the buffer's `snapshot` if there is one. The model comes first and
        remains if the rest fails. Threads write to the disk, because the caller's event loop watches
        processes meanwhile."""
        model = await self.save_model(trainer, step)
        filling = await _in_thread(self.begin, step)
        await trainer.save_checkpoint(str(filling.megatron))
        await _in_thread(_link_model, model, filling.hugging_face)
        if snapshot is not None:
            await _in_thread(filling.buffer.write_bytes, snapshot)
        return await _in_thread(self.commit, filling)

    async def save_model(self, trainer: Trainer, step: int) -> Path:
        """Saves the trainer's weights alone, as a Hugging Face folder, and removes older ones. Its path."""
        final = self._folder / f"{_MODEL_PREFIX}{step:06d}"
        unfinished = final.with_name(final.name + _PARTIAL)
        await _in_thread(self._clear_partial)
        await trainer.export_hugging_face(str(unfinished))
        await _in_thread(self._publish_model, unfinished, final, step)
        return final

    def model_of(self, step: int) -> Path:
        """Where the weights of a saved step are: in its checkpoint, or by themselves."""
        checkpoint = Checkpoint(step=step, path=self._folder / f"{_PREFIX}{step:06d}")
        if checkpoint.path.exists():
            return checkpoint.hugging_face
        return self._folder / f"{_MODEL_PREFIX}{step:06d}"

    def models(self) -> list[Path]:
        """The models that were saved without a checkpoint, or whose checkpoint is not whole; oldest first."""
        paths = self._folder.glob(f"{_MODEL_PREFIX}*")
        return sorted(path for path in paths if model_step(path) is not None)

    def newest_model(self) -> Path | None:
        """The folder of the newest weights, within a checkpoint or by itself. None before the first save."""
        checkpoint = self.latest()
        models = self.models()
        if checkpoint is None:
            return models[-1] if models else None
        if models and (model_step(models[-1]) or 0) > checkpoint.step:
            return models[-1]
        return checkpoint.hugging_face

    def _publish_model(self, unfinished: Path, final: Path, step: int) -> None:
        write_manifest(unfinished)
        flush_tree(unfinished)
        self._rename(unfinished, final)
        self.saved_step = step
        self._remove_models(step - 1)

    def _rename(self, unfinished: Path, final: Path) -> None:
        """A folder that has the final name already belongs to a lost incarnation, and is replaced."""
        if final.exists():
            final.rename(final.with_name(f"{final.name}.old{_PARTIAL}"))
        unfinished.rename(final)
        flush(self._folder)
        self._clear_partial()

    def _remove_models(self, last: int) -> None:
        """Removes those of step `last` and of earlier steps. A later one is of an incarnation that came
        further."""
        for path in self.models():
            if (model_step(path) or 0) <= last:
                shutil.rmtree(path)

    def _clear_partial(self) -> None:
        for path in self._folder.glob(f"*{_PARTIAL}*"):
            shutil.rmtree(path)


async def _in_thread(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Runs `work` beside the event loop. A cancellation waits for the thread, which cannot be stopped: the
    caller may write into the same folder next."""
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(None, partial(work, *arguments, **named))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})
        raise


def model_step(path: Path) -> int | None:
    """The step whose weights this folder holds by themselves; None for another folder."""
    return _step_in(path, _MODEL_PREFIX)


def _step_in(path: Path, prefix: str) -> int | None:
    step = path.name.removeprefix(prefix)
    if not path.name.startswith(prefix) or not step.isdecimal() or not path.is_dir():
        return None
    return int(step)


def _link_model(model: Path, to: Path) -> None:
    """Hard links to the same files, or copies if the file system has no hard links. The manifest of the
    checkpoint describes them."""
    to.mkdir()
    for file in model.iterdir():
        if file.name == MANIFEST_NAME:
            continue
        try:
            os.link(file, to / file.name)
        except OSError:
            shutil.copyfile(file, to / file.name)


def first_checkpoint(setting: str) -> Checkpoint | None:
    """The checkpoint that `--load-checkpoint` names, not checked yet. None if it names none: the model folder
    is step 0. Raises ConfigError."""
    if not setting:
        return None
    checkpoint = Checkpoint.at(Path(setting).expanduser().absolute())
    if checkpoint is None or not checkpoint.megatron.is_dir():
        fix = "give RUN/checkpoints/step-NNNNNN, with megatron/ in it"
        raise ConfigError("run.load_checkpoint", setting, "not the folder of a checkpoint", fix)
    return checkpoint


def check_served(model_folder: Path) -> None:
    """If a run has saved `model_folder`, in a checkpoint or by itself, its files are what was written. Raises
    ConfigError. Any other model folder has no manifest of ours, so there is nothing to compare with."""
    folder = model_folder
    subfolder = ""
    if model_folder.name == "hugging_face":  # within a checkpoint, whose manifest covers it
        folder = model_folder.parent
        subfolder = model_folder.name
    elif model_step(model_folder) is None:
        return
    if not (folder / MANIFEST_NAME).exists():
        return
    try:
        check_manifest(folder, below=subfolder)
    except DamagedFileError as error:
        fix = "give another checkpoint of the run"
        raise ConfigError("model.model_path", str(model_folder), str(error), fix) from error
