"""`invrl export`: copies the model of a step out of a run's checkpoints, checked, into
a folder of its own.

The run may be live: nothing in its folder is changed, and a checkpoint that the run
removes meanwhile is an error that says so. No engine and no trainer is needed."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invrl.cli.arguments import (
    read_number,
    read_options,
    read_run_folder,
    read_whole,
)
from invrl.errors import ConfigError, DamagedFileError
from invrl.host.files.disk import flush, flush_tree
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.run.settings.resolved_config import load_resolved
from invrl.store.manifest import check_manifest, write_manifest
from invrl.store.run_folder import RunFolder

if TYPE_CHECKING:
    import torch

    from invrl.interfaces import WeightLayout


def export(arguments: Sequence[str]) -> None:
    """usage: invrl export RUN_FOLDER [--step N] [--out FOLDER] [--max-shard-gb GB]
      --step N          the step whose model is written (default: the newest checkpoint)
      --out FOLDER      where to; a new folder or an empty one (default: NAME-step-N in the current one)
      --max-shard-gb GB largest file of weights (default: that of the run, 50)
    Writes a Hugging Face folder that transformers, SGLang and `invrl serve` load. Its tensors are
    those of the step byte for byte; an adapter is merged into its base. Needs no engine and no
    trainer, and changes nothing in the run's folder, so the run may still be running."""
    folder = read_run_folder(arguments)
    options = read_options(arguments[1:], ("--step", "--out", "--max-shard-gb"))
    step = None
    if "--step" in options:
        text = options["--step"]
        step = read_whole("--step", text, reason="not a step", fix="give a number")
    shard_gb = read_number(
        "--max-shard-gb",
        options.get("--max-shard-gb")
        or str(load_resolved(folder.config_path).train.max_shard_gb),
        reason="not a size",
        fix="give a number of GB above 0",
        least=1e-9,
    )
    target = None
    if "--out" in options:
        target = Path(options["--out"])
    print(f"model: {export_model(folder, step, target, max_shard_gb=shard_gb)}")


def export_model(
    folder: RunFolder, step: int | None, target: Path | None, *, max_shard_gb: float
) -> Path:
    """Write the model of `step` (None: the newest) to `target` (None: a folder in the
    current one, named after run and step), and return that folder. Its tensors are
    those of the step byte for byte. Raises ConfigError if there is no such step or the
    folder is not empty, DamagedFileError."""
    models = Checkpoints(folder.checkpoints_path).models_by_step()
    if not models:
        raise ConfigError(
            "RUN",
            str(folder.path),
            "it has no checkpoint yet",
            "wait for its first one",
        )
    if step is None:
        step = max(models)
    if step not in models:
        steps = ", ".join(map(str, sorted(models)))
        reason = f"the run has no checkpoint of this step; it has: {steps}"
        raise ConfigError(
            "--step", step, reason, "give one of these, or leave it out for the newest"
        )
    if target is None:
        target = Path(f"{folder.path.name}-step-{step:06d}")
    target = target.expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            "--out",
            str(target),
            "it exists and is not empty",
            "give a new folder as --out",
        )
    try:
        _check_model(models[step])
        _copy_model(models[step], target, max_shard_bytes=max_shard_gb * 1e9)
    except (DamagedFileError, OSError) as error:
        if not models[step].exists():
            reason = "the run removed its checkpoint meanwhile (--checkpoints.keep)"
            raise ConfigError("--step", step, reason, "give a later step") from error
        if isinstance(error, DamagedFileError):
            raise
        raise ConfigError(
            "--out", str(target), f"it cannot be written: {error}", "give another one"
        ) from error
    return target


def _check_model(model: Path) -> None:
    """Raise DamagedFileError if a file of the model differs from what was written."""
    if model.name == "hugging_face":  # within a checkpoint, whose manifest covers it
        check_manifest(model.parent, below=model.name)
    else:
        check_manifest(model)


def _copy_model(source: Path, target: Path, *, max_shard_bytes: float) -> None:
    """Copy a model, or merge an adapter into its base. The folder appears complete,
    with a manifest."""
    from invrl.train.adapters.merged_folder import merged_weights, read_base
    from invrl.train.adapters.peft_folder import is_peft_folder
    from invrl.train.weights.hf_export import copy_other_files, set_dtype
    from invrl.train.weights.safetensors_file import write_weights

    unfinished = target.with_name(f"{target.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    copy_other_files(source, unfinished)
    if is_peft_folder(source):
        layout, tensors = merged_weights(read_base(source), source)
        set_dtype(unfinished / "config.json", layout[0].dtype)
    else:
        layout, tensors = _saved_weights(source)
    written = write_weights(
        unfinished, layout, tensors, max_shard_bytes=max_shard_bytes
    )
    write_manifest(unfinished, written)
    flush_tree(unfinished)
    if target.exists():
        target.rmdir()
    unfinished.rename(target)
    flush(target.parent)


def _saved_weights(
    source: Path,
) -> "tuple[WeightLayout, Iterator[tuple[str, torch.Tensor]]]":
    """Return the layout and the tensors of a model's folder, in the order of its files,
    which is that of the trainer."""
    from safetensors import safe_open

    from invrl.user_code.model_folder import tensor_files
    from invrl.weights.tensors.tensor_spec import make_spec

    files = tensor_files(source)
    opened: dict[Path, Any] = {
        file: safe_open(file, framework="pt") for file in sorted(set(files.values()))
    }
    names = [name for file in opened.values() for name in file.offset_keys()]
    layout = tuple(
        make_spec(name, opened[files[name]].get_tensor(name)) for name in names
    )
    return layout, ((name, opened[files[name]].get_tensor(name)) for name in names)
