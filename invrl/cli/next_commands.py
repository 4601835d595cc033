"""Commands to copy for a run whose command has ended.

Every path is absolute and exists. The run's configuration may name tasks and code
relative to its working folder, so that folder is named too.
"""

import contextlib
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from invrl.observe.samples.samples import failed_purposes
from invrl.run.checkpoints.checkpoint import keep_model
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.run.settings.config import Config
from invrl.store.run_folder import RunFolder
from invrl.train.adapters.peft_folder import is_peft_folder


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
    lines = list(_commands(config, folder, finished=finished))
    if not lines:
        return ""
    return "\n".join([f"next (in {Path.cwd()}):", *lines])


def _commands(config: Config, folder: RunFolder, *, finished: bool) -> Iterator[str]:
    """Yield the lines of the commands that are useful with the run's output.
    `finished`: it reached its last step, or it has none, as an evaluation."""
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
        yield _line(purpose, *invrl, "resume", run)
    model = checkpoints.newest_model()
    if model and is_peft_folder(model):
        yield _line("merge its adapter into the model", *invrl, "export", run)
    elif model:
        if model.name == "hugging_face":  # within a checkpoint
            model = model.parent
        model_path = ("--model-path", str(model))
        yield _line("talk to the model", *invrl, "serve", *model_path)
        if config.rollout.rollout_function_path:
            settings = ("--config", str(folder.config_path))
            root = ("--run-root", str(folder.path.parent))
            name = ("--run-name", f"{folder.path.name}-eval")
            yield _line(
                "measure it", *invrl, "eval", *model_path, *settings, *root, *name
            )
    if folder.store_path.exists():
        yield _line("read what it said", *invrl, "samples", run)
        failed = failed_purposes(folder.store_path)
        if failed:
            held_out = () if "train" in failed else ("--eval",)
            purpose = "read why rollouts failed"
            yield _line(purpose, *invrl, "samples", run, "--failed", *held_out)
    if folder.metrics_path.exists():
        yield _line("look at it in a browser", *invrl, "view", run)
    if folder.tensorboard_path.exists():
        board = _program("tensorboard")
        logs = str(folder.tensorboard_path)
        yield _line("see its curves", *board, "--logdir", logs)


def _line(purpose: str, *arguments: str) -> str:
    return f"  {shlex.join(arguments)}   # {purpose}"


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
