"""What a person can do with a run whose command has ended, as commands to copy.

Every path is absolute and exists. The run's configuration may name tasks and code relative to the
folder that it was started in, so that folder is named too."""

import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from invrl.run.checkpoints import Checkpoints
from invrl.run.config import Config
from invrl.store.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class NextCommand:
    arguments: tuple[str, ...]
    purpose: str

    def __str__(self) -> str:
        return f"  {shlex.join(self.arguments)}   # {self.purpose}"


def next_commands(config: Config, folder: RunFolder, *, finished: bool) -> list[NextCommand]:
    """Those that make sense with what the run has left behind. `finished`: it came to its end."""
    return list(_commands(config, folder, finished=finished))


def describe_next(config: Config, folder: RunFolder, *, finished: bool) -> str:
    """A heading and a line for each; empty where there is nothing to do."""
    commands = next_commands(config, folder, finished=finished)
    if not commands:
        return ""
    lines = [str(command) for command in commands]
    return "\n".join([f"next (in {Path.cwd()}):", *lines])


def _commands(config: Config, folder: RunFolder, *, finished: bool) -> Iterator[NextCommand]:
    invrl = _program("invrl")
    run = str(folder.path)
    checkpoints = Checkpoints(folder.checkpoints_path)
    latest = checkpoints.latest()
    if not finished and not config.run.debug_train_only:
        purpose = "begin again: there is no checkpoint yet"
        if latest:
            purpose = f"continue from step {latest.step}"
        yield NextCommand(arguments=(*invrl, "resume", run), purpose=purpose)
    model = checkpoints.newest_model()
    if model:
        path = model.parent if model.name == "hugging_face" else model
        yield NextCommand(arguments=(*invrl, "serve", "--model-path", str(path)), purpose="talk to the model")
        if config.rollout.rollout_function_path:
            measured = ("--model-path", str(path), "--config", str(folder.config_path))
            place = ("--run-root", str(folder.path.parent), "--run-name", f"{folder.path.name}-eval")
            yield NextCommand(arguments=(*invrl, "eval", *measured, *place), purpose="measure it")
    if folder.store_path.exists():
        yield NextCommand(arguments=(*invrl, "samples", run), purpose="read what it said")
    if folder.tensorboard_path.exists():
        board = (*_program("tensorboard"), "--logdir", str(folder.tensorboard_path))
        yield NextCommand(arguments=board, purpose="see its curves")


def _program(name: str) -> tuple[str, ...]:
    """How a shell starts it: by its name where that finds it, else by its path beside this Python."""
    here = Path(sys.executable).parent / name
    found = shutil.which(name)
    if found is not None and (not here.exists() or Path(found).samefile(here)):
        return (name,)
    if here.exists():
        return (str(here),)
    return (sys.executable, "-m", "invrl.cli" if name == "invrl" else "tensorboard.main")
