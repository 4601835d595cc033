"""A run's checkpoints, each one folder per step, complete or absent; and the newest
weights as a standalone model.

    checkpoints/step-000004/   megatron/ (model, optimizer, schedule, RNG), hugging_face/ (the model),
                               buffer.json (buffer, data cursor, place in the ledger),
                               manifest.json (size and checksum of each of these files)
    checkpoints/model-000005/  the model alone, as a Hugging Face folder with a manifest.json

Each is written under another name, flushed to disk and renamed, so a crash at any byte
leaves the last complete one. A checkpoint is checked against its manifest before it is
loaded.

The model of a step is saved before the optimizer's state, which is six times as large.
If that state cannot be written (the disk or the memory is full), `model-N` remains. It
can be evaluated, served and used as the model of a new run, but no run resumes from it.
Once the checkpoint of the step is complete, `model-N` is removed.
"""

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from invrl.errors import DamagedFileError, NewerFormatError, OtherModelError
from invrl.host.files.disk import check_space, flush, flush_tree, is_full
from invrl.interfaces import Trainer
from invrl.run.checkpoints.checkpoint import (
    MODEL_PREFIX,
    STEP_PREFIX,
    Checkpoint,
    model_step,
    step_in,
)
from invrl.run.checkpoints.checkpoint_scores import kept_steps
from invrl.store.manifest import MANIFEST_NAME, read_entries, write_manifest
from invrl.store.run_folder import KEEP_NAME
from invrl.types.file_entry import FileEntries

P = ParamSpec("P")
T = TypeVar("T")

_PARTIAL = ".partial"
_DAMAGED = ".damaged"
_REFUSED = ".refused"
"""Suffix of a checkpoint that is complete but unusable: of another model, or of a newer
format."""


class CopyingTrainer(Trainer, Protocol):
    """A trainer that can write a copy of its state while it continues to train."""

    async def copy_model(self, path: str) -> None:
        """Copy the weights and begin to write them as `export_hugging_face` does."""

    async def copy_checkpoint(self, path: str) -> None:
        """Copy the state and begin to write it, after the weights."""

    async def model_written(self) -> FileEntries:
        """Wait for the weights. Raises what their writing raised."""
        ...

    async def checkpoint_written(self) -> None:
        """Wait for the state, on all ranks."""

    async def finish_checkpoint(self) -> FileEntries:
        """Finish the writing of the state. Returns and raises as `save_checkpoint`
        does."""
        ...


class Checkpoints:
    """Checkpoints of one run, in `folder`. `keep`: number of the newest that stay; 0
    keeps all. `keep_best`: number of the older ones that stay, by the scores that
    `read_scores` returns by step."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 0,
        keep_best: int = 0,
        read_scores: Callable[[], Mapping[int, float]] = dict,
    ) -> None:
        self.folder = folder
        self._keep = keep
        self._keep_best = keep_best
        self._read_scores = read_scores
        self._in_flight: asyncio.Task[None] | None = None
        """Checkpoint that is being written alongside training."""
        self._failed = asyncio.Event()
        self.saved_step: int | None = None
        """Step of the newest weights that this object has saved, even if their
        checkpoint failed."""
        self.step_in_evaluation: Callable[[], int | None] = lambda: None
        """Returns the step whose held-out score is being measured."""

    def is_whole(self, step: int) -> bool:
        """Whether there is a checkpoint of this step."""
        return self._step_path(step).is_dir()

    def all(self) -> list[Checkpoint]:
        """Return the checkpoints, oldest first."""
        found = map(Checkpoint.at, self.folder.glob(f"{STEP_PREFIX}*"))
        checkpoints = [checkpoint for checkpoint in found if checkpoint is not None]
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)

    def latest(self) -> Checkpoint | None:
        return max(self.all(), key=lambda checkpoint: checkpoint.step, default=None)

    def damaged(self) -> list[str]:
        """Return the names of the checkpoints that were damaged and renamed."""
        return sorted(
            path.name for path in self.folder.glob(f"{STEP_PREFIX}*{_DAMAGED}*")
        )

    def newest_whole(
        self, report: Callable[[str], object], model_folder: Path
    ) -> Checkpoint | None:
        """Return the newest checkpoint of the model in `model_folder` with a known
        format and undamaged files; None if the run has made no checkpoint. Other
        checkpoints are renamed; `report` receives the damaged file and the lost steps.
        Raises DamagedFileError if there were checkpoints and none can be used."""
        refusals: list[tuple[Checkpoint, DamagedFileError]] = []
        for checkpoint in reversed(self.all()):
            try:
                checkpoint.check(model_folder)
            except (NewerFormatError, OtherModelError) as error:
                refusals.append((checkpoint, error))
            except DamagedFileError as error:
                report(self._put_aside(checkpoint, error))
            else:
                for refused, error in refusals:
                    report(self._put_aside(refused, error))
                return checkpoint
        if refusals:  # the command is at fault, so nothing is renamed
            _, error = refusals[0]
            raise error
        damaged = self.damaged()
        if damaged:
            fix = (
                "copy a whole checkpoint back to this folder, or begin a new run under another --run-name. "
                "A hugging_face folder in a damaged checkpoint may still serve as its --model-path"
            )
            reason = f"no checkpoint is whole; damaged ones: {', '.join(damaged)}"
            raise DamagedFileError(self.folder, reason, fix)
        return None

    def _put_aside(self, checkpoint: Checkpoint, error: DamagedFileError) -> str:
        """Rename it, to an unused name that no checkpoint has. Returns a sentence for
        the console."""
        ending = _DAMAGED
        finding = "is damaged"
        if isinstance(error, NewerFormatError | OtherModelError):
            ending = _REFUSED
            finding = "cannot be used"
        renamed = checkpoint.path.with_name(f"{checkpoint.path.name}{ending}")
        number = 1
        while renamed.exists():
            number += 1
            renamed = checkpoint.path.with_name(
                f"{checkpoint.path.name}{ending}-{number}"
            )
        checkpoint.path.rename(renamed)
        flush(self.folder)
        older = [other for other in self.all() if other.step < checkpoint.step]
        lost_steps = "All its steps"
        if older:
            lost_steps = f"Steps {older[-1].step + 1} to {checkpoint.step}"
        return (
            f"the checkpoint of step {checkpoint.step} {finding}: {error.path.name}: {error.reason}. "
            f"It is kept as {renamed.name}. {lost_steps} are lost and made again"
        )

    def check_space(self) -> None:
        """Raise DiskFullError if there is no space for a checkpoint as large as the
        newest one, before any rank is called."""
        latest = self.latest()
        if latest is not None:
            check_space(self.folder, _num_bytes(latest.path))

    def clear_partial(self) -> None:
        """Remove the remains of failed saves."""
        for path in self.folder.glob(f"*{_PARTIAL}*"):
            shutil.rmtree(path)

    def begin(self, step: int) -> Checkpoint:
        """Return an empty folder to fill. `commit` makes it a checkpoint."""
        self.clear_partial()
        filling = Checkpoint(step=step, path=_unfinished(self._step_path(step)))
        filling.path.mkdir(parents=True)
        return filling

    def commit(self, filled: Checkpoint, written: FileEntries) -> Checkpoint:
        """Write the manifest, flush everything and give the folder its name. Then
        remove checkpoints that are not kept, and saved models that are not newer.
        `written`: the known entries."""
        write_manifest(filled.path, written)
        flush_tree(filled.path)
        final = self._step_path(filled.step)
        self._rename(filled.path, final)
        self._remove_old()
        self._remove_models(filled.step)
        return Checkpoint(step=filled.step, path=final)

    def _remove_old(self) -> None:
        """Remove the checkpoints that are not kept. The newest one, which is complete,
        always is."""
        scores: Mapping[int, float] = {}
        in_evaluation = self.step_in_evaluation()
        if self._keep_best:
            scores = self._read_scores()
        checkpoints = self.all()
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = kept_steps(
            steps,
            newest=self._keep,
            best=self._keep_best,
            scores=scores,
            in_evaluation=in_evaluation,
        )
        for checkpoint in checkpoints:
            if checkpoint.step in kept:
                continue
            if checkpoint.keeps_model:
                self._remove(checkpoint.megatron)
                checkpoint.buffer.unlink(missing_ok=True)
            else:
                self._remove(checkpoint.path)

    def _remove(self, folder: Path) -> None:
        """Remove a folder. A crash at any moment leaves the folder intact, or no folder
        of this name: the next save removes the rest."""
        removed = self.folder / f"{folder.parent.name}-{folder.name}.removed{_PARTIAL}"
        folder.rename(removed)
        flush(folder.parent)
        flush(self.folder)
        shutil.rmtree(removed)

    async def save(
        self, trainer: Trainer, step: int, snapshot: bytes | None = None
    ) -> Checkpoint:
        """Save the trainer as it is, and the buffer's `snapshot` if there is one. The
        model comes first and remains if the rest fails. Threads write to the disk, so
        the caller's event loop continues to watch processes."""
        model = await self.save_model(trainer, step)
        filling = await _in_thread(self.begin, step)
        state = await trainer.save_checkpoint(str(filling.megatron))
        return await self._complete(filling, model, state, snapshot)

    async def _complete(
        self,
        filling: Checkpoint,
        model: Path,
        state: FileEntries,
        snapshot: bytes | None,
    ) -> Checkpoint:
        """Make a checkpoint of the trainer's state, which is in `filling`, and the
        saved model."""
        linked = await _in_thread(_link_model, model, filling.hugging_face)
        if snapshot is not None:
            await _in_thread(filling.buffer.write_bytes, snapshot)
        written = {
            **_below(filling.megatron, state),
            **_below(filling.hugging_face, linked),
        }
        return await _in_thread(self.commit, filling, written)

    async def save_beside_training(
        self, trainer: CopyingTrainer, step: int, snapshot: bytes | None = None
    ) -> None:
        """Save as `save` does, but return as soon as the trainer has copied its state.
        First waits for the previous checkpoint, so that there is one copy at most.
        `watch` and the next call that waits raise a failure of the writing."""
        await self.wait_until_saved()
        filling = await _in_thread(self.begin, step)
        unfinished = _unfinished(self._model_path(step))
        await trainer.copy_model(str(unfinished))
        await trainer.copy_checkpoint(str(filling.megatron))
        self._in_flight = asyncio.create_task(
            self._write(trainer, filling, unfinished, snapshot)
        )
        self._in_flight.add_done_callback(self._note_end)

    async def _write(
        self,
        trainer: CopyingTrainer,
        filling: Checkpoint,
        unfinished: Path,
        snapshot: bytes | None,
    ) -> None:
        """Await the trainer's writing, and publish it. The model comes first, as in
        `save`. If its disk is full, return once nothing is being written any more."""
        model = self._model_path(filling.step)
        try:
            written = await trainer.model_written()
            await _in_thread(
                self._publish_model, unfinished, model, filling.step, written
            )
        except Exception as error:
            if is_full(error):
                await trainer.checkpoint_written()
            raise
        await trainer.checkpoint_written()
        state = await trainer.finish_checkpoint()
        await self._complete(filling, model, state, snapshot)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Record a failure. A full disk does not end the run: only `wait_until_saved`
        raises it."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not is_full(error):
            self._failed.set()

    async def wait_until_saved(self) -> None:
        """Wait until no checkpoint is being written. Raises what the writing raised.
        The trainer's calls have deadlines, so this wait has one too."""
        if self._in_flight is None:
            return
        try:
            await asyncio.shield(self._in_flight)
        except Exception as error:
            if is_full(error):  # another save may follow
                self._in_flight = None
            raise
        self._in_flight = None

    async def watch(self) -> None:
        """Raise the failure of a checkpoint that is written alongside training. Never
        returns."""
        await self._failed.wait()
        assert self._in_flight is not None
        await self._in_flight

    async def save_model(self, trainer: Trainer, step: int) -> Path:
        """Save only the trainer's weights, as a Hugging Face folder, and remove older
        ones. Returns its path."""
        await self.wait_until_saved()
        final = self._model_path(step)
        unfinished = _unfinished(final)
        await _in_thread(self.clear_partial)
        written = await trainer.export_hugging_face(str(unfinished))
        await _in_thread(self._publish_model, unfinished, final, step, written)
        return final

    def saved_model_folder(self, step: int) -> Path:
        """Return the folder of a saved step's weights: in its checkpoint, or
        standalone."""
        checkpoint = Checkpoint(step=step, path=self._step_path(step))
        if checkpoint.path.exists():
            return checkpoint.hugging_face
        return self._model_path(step)

    def _step_path(self, step: int) -> Path:
        return self.folder / f"{STEP_PREFIX}{step:06d}"

    def _model_path(self, step: int) -> Path:
        """Return the path of the step's standalone weights."""
        return self.folder / f"{MODEL_PREFIX}{step:06d}"

    def models(self) -> list[Path]:
        """Return the models that were saved without a checkpoint, or whose checkpoint
        is incomplete; oldest first."""
        paths = self.folder.glob(f"{MODEL_PREFIX}*")
        return sorted(path for path in paths if model_step(path) is not None)

    def models_by_step(self) -> dict[int, Path]:
        """Return the folders of all saved weights, within checkpoints and
        standalone."""
        models = {model_step(path) or 0: path for path in self.models()}
        for path in self.folder.glob(f"{STEP_PREFIX}*"):
            step = step_in(path, STEP_PREFIX)
            if step is not None and (path / "hugging_face").is_dir():
                models[step] = path / "hugging_face"
        return models

    def newest_model(self) -> Path | None:
        """Return the folder of the newest weights, within a checkpoint or standalone.
        None before the first save."""
        models = self.models_by_step()
        return models[max(models)] if models else None

    def _publish_model(
        self, unfinished: Path, final: Path, step: int, written: FileEntries
    ) -> None:
        write_manifest(unfinished, written)
        flush_tree(unfinished)
        self._rename(unfinished, final)
        self.saved_step = step
        self._remove_models(step - 1)

    def _rename(self, unfinished: Path, final: Path) -> None:
        """Give a folder its final name. One that already has the name belongs to a lost
        incarnation and is replaced. A path that a user was shown stays valid."""
        if (final / KEEP_NAME).exists():
            (unfinished / KEEP_NAME).touch()
        old = final.with_name(f"{final.name}.old{_PARTIAL}")
        if final.exists():
            final.rename(old)
        unfinished.rename(final)
        flush(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _remove_models(self, last: int) -> None:
        """Remove the models of step `last` and earlier, unless they are protected. A
        later one is of an incarnation that came further."""
        for path in self.models():
            if (model_step(path) or 0) <= last and not (path / KEEP_NAME).exists():
                self._remove(path)


def _unfinished(final: Path) -> Path:
    """Return the path under which a folder is written before it has its name."""
    return final.with_name(final.name + _PARTIAL)


async def _in_thread(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Run `work` in a thread. A cancellation waits for the thread, which cannot be
    stopped: the caller may write into the same folder next."""
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(None, partial(work, *arguments, **named))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})
        raise


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _below(folder: Path, entries: FileEntries) -> FileEntries:
    """Return the same entries relative to the folder's parent."""
    return {f"{folder.name}/{name}": entry for name, entry in entries.items()}


def _link_model(model: Path, to: Path) -> FileEntries:
    """Make hard links to the same files, or copies if the file system has no hard
    links. The checkpoint's manifest describes them, too. Returns their entries."""
    to.mkdir()
    for file in model.iterdir():
        if file.name in (MANIFEST_NAME, KEEP_NAME):
            continue
        try:
            os.link(file, to / file.name)
        except OSError:
            shutil.copyfile(file, to / file.name)
    return read_entries(model)
