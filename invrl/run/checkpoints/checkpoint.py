"""One checkpoint of a run, or one saved model: its paths, and the check of its
files."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from invrl.errors import ConfigError, DamagedFileError, OtherModelError
from invrl.families.hf_config import read_hf_config
from invrl.store.manifest import MANIFEST_NAME, check_manifest, is_manifest
from invrl.store.run_folder import KEEP_NAME, Below
from invrl.user_code.model_folder import read_model_type

STEP_PREFIX = "step-"
MODEL_PREFIX = "model-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Paths of one checkpoint, made after `step` training steps; it holds weight
    version `step`."""

    step: int
    path: Path

    megatron = Below("megatron")
    hugging_face = Below("hugging_face")
    buffer = Below("buffer.json")
    """Missing if the run had no buffer (`--data-path`, `--debug-train-only`)."""

    @classmethod
    def at(cls, path: Path) -> Self | None:
        """Return the checkpoint in this folder, unchecked; None if the folder is not a
        checkpoint."""
        step = step_in(path, STEP_PREFIX)
        if step is None:
            return None
        checkpoint = cls(step=step, path=path)
        if checkpoint.keeps_model and not checkpoint.megatron.is_dir():
            return None  # only its model was kept
        return checkpoint

    @property
    def keeps_model(self) -> bool:
        """Whether its model must not be removed."""
        return (self.path / KEEP_NAME).exists()

    def check(self, model_folder: Path) -> None:
        """Raise DamagedFileError if a file differs from what was written;
        NewerFormatError; OtherModelError if the checkpoint is not of the model in
        `model_folder`."""
        check_manifest(self.path)
        if not self.megatron.is_dir():
            raise DamagedFileError(self.megatron, "it is missing")
        if (self.hugging_face / "config.json").exists():
            _check_same_model(self.hugging_face, model_folder)


def keep_model(model: Path) -> None:
    """Protect this model, in a checkpoint or standalone, from removal by any run.
    Called when a user is shown its path. A full or read-only disk is not an error: the
    path is still right."""
    folder = model
    if model.name == "hugging_face":
        folder = model.parent
    with contextlib.suppress(OSError):
        (folder / KEEP_NAME).touch()


def model_step(path: Path) -> int | None:
    """Return the step of a standalone model's folder; None for another folder."""
    return step_in(path, MODEL_PREFIX)


def step_in(path: Path, prefix: str) -> int | None:
    """Return the number after the prefix in a folder's name; None for another name, or
    if it is not a folder."""
    step = path.name.removeprefix(prefix)
    if not path.name.startswith(prefix) or not step.isdecimal() or not path.is_dir():
        return None
    return int(step)


def _check_same_model(found: Path, expected: Path) -> None:
    """Raise OtherModelError if the trainer would compute different models from the
    config.json of these Hugging Face folders."""
    found_values = _model_values(found)
    for name, expected_value in _model_values(expected).items():
        value = found_values[name]
        if value != expected_value:
            reason = f"it is of another model: {name} is {value!r}, and in {expected} it is {expected_value!r}"
            fix = "give the model that the run began with"
            raise OtherModelError(found / "config.json", reason, fix)


def _model_values(folder: Path) -> dict[str, object]:
    model_type = read_model_type(folder)
    return {"model_type": model_type, **read_hf_config(folder).model_dump()}


def first_checkpoint(setting: str | None) -> Checkpoint | None:
    """Return the checkpoint that `--load-checkpoint` names, unchecked. None without
    one: the model folder is step 0. Raises ConfigError."""
    if not setting:
        return None
    checkpoint = Checkpoint.at(Path(setting).expanduser().absolute())
    if checkpoint is None or not checkpoint.megatron.is_dir():
        fix = "give RUN/checkpoints/step-NNNNNN, with megatron/ in it"
        raise ConfigError(
            "run.load_checkpoint", setting, "not the folder of a checkpoint", fix
        )
    return checkpoint


def check_served(model_folder: Path) -> None:
    """Check the files of a `model_folder` that invrl has written (in a checkpoint,
    standalone, or by `invrl export`). Raises ConfigError. Other model folders have no
    manifest of ours to compare with."""
    folder = model_folder
    subfolder = ""
    if (
        model_folder.name == "hugging_face"
    ):  # within a checkpoint, whose manifest covers it
        folder = model_folder.parent
        subfolder = model_folder.name
    manifest = folder / MANIFEST_NAME
    saved_by_run = subfolder != "" or model_step(model_folder) is not None
    if not manifest.exists() or not (saved_by_run or is_manifest(manifest)):
        return
    try:
        check_manifest(folder, below=subfolder)
    except DamagedFileError as error:
        fix = f"give another checkpoint; if you changed the file yourself, remove {manifest}"
        raise ConfigError(
            "model.model_path", str(model_folder), str(error), fix
        ) from error
