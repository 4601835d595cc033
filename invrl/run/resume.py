"""What a life of a run begins from, in a sentence: anew, from a checkpoint, or not at all. A command that is
repeated says so, because the same words may train anew, go on, or do nothing."""

from dataclasses import dataclass

from invrl.run.checkpoints import Checkpoint
from invrl.store.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    text: str
    finished: bool = False
    """There is nothing left to do."""


def beginning_of(folder: RunFolder, begin: Checkpoint | None, *, num_steps: int) -> Beginning:
    """`begin`: the newest whole checkpoint, None without one."""
    ended_after = _ended_after(folder)
    if begin is None:
        if ended_after is not None:
            text = f"the run ended after step {ended_after} without a checkpoint: it starts anew, from step 0"
            return Beginning(text=text)
        if folder.store_path.exists():
            text = f"the run in {folder.path} ended before its first checkpoint: it starts anew, from step 0"
            return Beginning(text=text)
        return Beginning(text=f"a new run of {num_steps} steps")
    if ended_after is not None and begin.step >= num_steps:
        text = (
            f"the run is finished: it has made its {num_steps} steps. To go on raise --num-steps; to train "
            "anew give another --run-name"
        )
        return Beginning(text=text, finished=True)
    early = "" if ended_after is None else f"; it had ended after step {ended_after}"
    return Beginning(text=f"going on from the checkpoint of step {begin.step} of {num_steps}{early}")


def _ended_after(folder: RunFolder) -> int | None:
    """The last step of a run that came to its end; None if it did not."""
    try:
        return int(folder.finished_path.read_text())
    except (OSError, ValueError):
        return None
