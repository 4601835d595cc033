"""Commands to copy for a run whose command has ended.

Every path is absolute and exists. The run's configuration may name tasks and code
relative to its working folder, so that folder is named too.
"""

import contextlib
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from invrl.observe.samples.samples import failed_purposes
from invrl.run.checkpoints.checkpoint import keep_model
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.run.settings.config import Config
from invrl.store.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class NextCommand:
    arguments: tuple[str, ...]
    purpose: str

    @property
    def text(self) -> str:
        """Command for a shell."""
        return shlex.join(self.arguments)

    def __str__(self) -> str:
        return f"  {self.text}   # {self.purpose}"


def next_commands(
    config: Config, folder: RunFolder, *, finished: bool
) -> list[NextCommand]:
    """Return the commands that are useful with the run's output. `finished`: it reached
    its last step, or it has none, as an evaluation."""
    return list(_commands(config, folder, finished=finished))


def print_next(config: Config, folder: RunFolder, *, finished: bool) -> None:
    """Print `describe_next`, and keep the model that it names."""
    text = describe_next(config, folder, finished=finished)
    model = Checkpoints(folder.checkpoints_path).newest_model()
    if model is not None:
        keep_model(model)
    if text:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(text, flush=True)


def describe_next(config: Config, folder: RunFolder, *, finished: bool) -> str:
    """Return a heading and one line per command. Empty if there are no commands."""
    commands = next_commands(config, folder, finished=finished)
    if not commands:
        return ""
    lines = [str(command) for command in commands]
    return "\n".join([f"next (in {Path.cwd()}):", *lines])


def _commands(
    config: Config, folder: RunFolder, *, finished: bool
) -> Iterator[NextCommand]:
    invrl = _program("invrl")
    run = str(folder.path)
    checkpoints = Checkpoints(folder.checkpoints_path)
    latest = checkpoints.latest()
    # else a resume is refused
    can_resume = latest is not None or not checkpoints.damaged()
    if not finished and not config.run.debug_train_only and can_resume:
        purpose = "begin again: there is no checkpoint yet"
        if latest:
            purpose = f"continue from step {latest.step}"
        yield NextCommand(arguments=(*invrl, "resume", run), purpose=purpose)
    model = checkpoints.newest_model()
    if model:
        if model.name == "hugging_face":  # within a checkpoint
            model = model.parent
        model_path = ("--model-path", str(model))
        yield NextCommand(
            arguments=(*invrl, "serve", *model_path), purpose="talk to the model"
        )
        if config.rollout.rollout_function_path:
            settings = ("--config", str(folder.config_path))
            place = (
                "--run-root",
                str(folder.path.parent),
                "--run-name",
                f"{folder.path.name}-eval",
            )
            arguments = (*invrl, "eval", *model_path, *settings, *place)
            yield NextCommand(arguments=arguments, purpose="measure it")
    if folder.store_path.exists():
        yield NextCommand(
            arguments=(*invrl, "samples", run), purpose="read what it said"
        )
        failed = failed_purposes(folder.store_path)
        if failed:
            held_out = () if "train" in failed else ("--eval",)
            arguments = (*invrl, "samples", run, "--failed", *held_out)
            yield NextCommand(arguments=arguments, purpose="read why rollouts failed")
    if folder.metrics_path.exists():
        yield NextCommand(
            arguments=(*invrl, "view", run), purpose="look at it in a browser"
        )
    if folder.tensorboard_path.exists():
        board = (*_program("tensorboard"), "--logdir", str(folder.tensorboard_path))
        yield NextCommand(arguments=board, purpose="see its curves")


def _program(name: str) -> tuple[str, ...]:
    """Return how a shell starts the program "invrl" or "tensorboard" of this
    environment: by its name if PATH leads to it, otherwise by its path next to this
    Python, or else as a module."""
    ours = Path(sys.executable).parent / name
    on_path = shutil.which(name)
    if on_path is not None and (not ours.exists() or Path(on_path).samefile(ours)):
        return (name,)
    if ours.exists():
        return (str(ours),)
    module = {"invrl": "invrl.cli", "tensorboard": "tensorboard.main"}[name]
    return (sys.executable, "-m", module)
