"""`--model-path RUN`: a run that starts from another run's newest model, as the next of
several stages.

Invariant: the model is determined once, when the run is started, and written into its
configuration. The other run may continue and save newer ones.
"""

from pathlib import Path

from invrl.run.checkpoints.checkpoint import keep_model
from invrl.run.settings.config import Config
from invrl.run.settings.run_config import is_run_folder, model_folder
from invrl.types.section import Section


def with_initial_models(config: Config) -> Config:
    """Return the configuration with runs replaced by their newest checkpoints, and
    protect these models from removal. A run that has saved none stays, for a check to
    refuse."""
    model = config.model
    settled = {
        "model_path": _settled(model.model_path),
        "reference_model_path": _settled(model.reference_model_path),
    }
    changed: dict[str, Section] = {"model": model.model_copy(update=settled)}
    critic = config.algorithm.critic
    if critic is not None:
        of_critic = {"model_path": _settled(critic.model_path)}
        tables = {"critic": critic.model_copy(update=of_critic)}
        changed["algorithm"] = config.algorithm.model_copy(update=tables)
    return config.model_copy(update=changed)


def without_initial_adapter(config: Config) -> Config:
    """Return the configuration of a start at a checkpoint, which has the adapter: the
    one of `--lora.path` need not be there any more."""
    lora = config.train.lora
    if lora is None or lora.path is None:
        return config
    train = config.train.model_copy(
        update={"lora": lora.model_copy(update={"path": None})}
    )
    return config.model_copy(update={"train": train})


def _settled(path: str | None) -> str | None:
    """Return the checkpoint of a run that has one; any other path as it is."""
    if path is None or not is_run_folder(Path(path).expanduser().absolute()):
        return path
    folder = model_folder(path)
    if is_run_folder(folder):
        return path
    keep_model(folder)
    return str(folder.parent if folder.name == "hugging_face" else folder)
