"""`invrl export`: writes the model of a step into a separate folder."""

from collections.abc import Sequence
from pathlib import Path

from invrl.cli.arguments import read_options, read_run_folder
from invrl.errors import ConfigError
from invrl.run.resolved_config import load_resolved


def export(arguments: Sequence[str]) -> None:
    """usage: invrl export RUN_FOLDER [--step N] [--out FOLDER] [--max-shard-gb GB]
      --step N          the step whose model is written (default: the newest checkpoint)
      --out FOLDER      where to; a new folder or an empty one (default: NAME-step-N in the current one)
      --max-shard-gb GB largest file of weights (default: that of the run, 50)
    Writes a Hugging Face folder that transformers, SGLang and `invrl serve` load. Its tensors are
    those of the step byte for byte. Needs no engine and no trainer, and changes nothing in the run's
    folder, so the run may still be running."""
    from invrl.run.export import export_model

    folder = read_run_folder(arguments)
    options = read_options(arguments[1:], ("--step", "--out", "--max-shard-gb"))
    step = None
    if "--step" in options:
        step = _read_step(options["--step"])
    shard_gb = load_resolved(folder.config_path).train.max_shard_gb
    if "--max-shard-gb" in options:
        shard_gb = _read_shard_size(options["--max-shard-gb"])
    target = None
    if "--out" in options:
        target = Path(options["--out"])
    print(f"model: {export_model(folder, step, target, max_shard_gb=shard_gb)}")


def _read_step(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError("--step", text, "not a step", "give a number")
    return int(text)


def _read_shard_size(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0.0 < size < float("inf"):
        raise ConfigError(
            "--max-shard-gb", text, "not a size", "give a number of GB above 0"
        )
    return size
