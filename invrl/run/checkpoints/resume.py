"""Start of an incarnation of a run: at the run's newest whole checkpoint, or at step 0.

A resume, in the order in which it happens (`run/incarnations/incarnation.py` makes
these calls):

    find_start                here: the newest checkpoint whose files are what was written
    check_store_at            here: run.sqlite is whole, and fits the checkpoint
    BufferActor.start         buffer/process/buffer_actor.py: reads the snapshot, and the outcomes that came after it
      GroupBuffer.restore     buffer/groups/group_buffer.py: open groups, data cursor, counts
    TrainerState.load         train/trainer/trainer_state.py: model, optimizer, random state
    WeightUpdater.update      run/loop/weight_updater.py: gives the loaded weights to every engine

Steps after that checkpoint are lost: their rows leave `metrics.jsonl`, and their saved
batches are renamed. What they did in the ledger counts as lost by itself
(`buffer/ledger/ledger_store.py`). A repeated command says where it starts, because the
same words may begin a new run, resume one, or do nothing."""

from dataclasses import dataclass
from pathlib import Path

from invrl.run.checkpoints.checkpoint import Checkpoint
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.run.checkpoints.store_check import check_checkpoint_store, check_store
from invrl.store.batch_file import rename_lost_batches
from invrl.store.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """`checkpoint`: None at step 0."""

    checkpoint: Checkpoint | None
    findings: tuple[str, ...] = ()
    """Messages for the console about damaged files and files of lost steps."""

    @property
    def step(self) -> int:
        """Last step before this incarnation; its weights have this version."""
        if self.checkpoint is None:
            return 0
        return self.checkpoint.step

    def read_snapshot(self) -> bytes | None:
        """Return the buffer's snapshot; None at step 0."""
        if self.checkpoint is None:
            return None
        return self.checkpoint.buffer.read_bytes()


def find_start(
    folder: RunFolder, checkpoints: Checkpoints, model_folder: Path
) -> Start:
    """Choose the newest undamaged checkpoint of the model in `model_folder`, and set
    aside the remains of later steps in the folder. Raises DamagedFileError if there are
    checkpoints and none can be used."""
    findings: list[str] = []
    checkpoint = checkpoints.newest_whole(findings.append, model_folder)
    step = Start(checkpoint=checkpoint).step
    metrics_finding = folder.rewind_metrics(step)
    if metrics_finding:
        findings.append(metrics_finding)
    renamed = rename_lost_batches(folder.rollout_data_path, after_step=step)
    if renamed:
        names = ", ".join(path.name for path in renamed)
        findings.append(f"batches of a lost incarnation are renamed: {names}")
    return Start(checkpoint=checkpoint, findings=tuple(findings))


def start_at_zero(folder: RunFolder) -> Start:
    """Return the start of a run that ignores the checkpoints in its folder: all rows of
    its metrics are lost."""
    metrics_finding = folder.rewind_metrics(0)
    if not metrics_finding:
        return Start(checkpoint=None)
    return Start(checkpoint=None, findings=(metrics_finding,))


def check_store_at(start: Start, folder: RunFolder) -> None:
    """Check that the run's store is undamaged and holds what the checkpoint needs.
    Raises DamagedFileError."""
    snapshot = start.read_snapshot()
    if start.checkpoint is not None and snapshot is not None:
        check_checkpoint_store(folder.store_path, start.checkpoint.path, snapshot)
    elif folder.store_path.exists():
        check_store(folder.store_path)


def is_finished(folder: RunFolder, start: Start, *, num_steps: int) -> bool:
    """Whether the run came to its end and has no more steps to make."""
    return (
        start.checkpoint is not None
        and start.step >= num_steps
        and _ended_after(folder) is not None
    )


def describe_start(folder: RunFolder, start: Start, *, num_steps: int) -> str:
    """Return one sentence for the console."""
    ended_after = _ended_after(folder)
    if start.checkpoint is None:
        if ended_after is not None:
            return f"the run ended after step {ended_after} without a checkpoint: it starts again from step 0"
        if folder.store_path.exists():
            return f"the run in {folder.path} ended before its first checkpoint: it starts again from step 0"
        return f"a new run of {num_steps} steps"
    if is_finished(folder, start, num_steps=num_steps):
        return (
            f"the run is finished: it has made its {num_steps} steps. To continue it, raise --num-steps; to "
            "train from the beginning, give another --run-name"
        )
    text = f"resuming from the checkpoint of step {start.step} of {num_steps}"
    if ended_after is None:
        return text
    return f"{text}; the run had ended after step {ended_after}"


def _ended_after(folder: RunFolder) -> int | None:
    """Return the last step of a run that came to its end; None if it did not."""
    try:
        return int(folder.finished_path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
