"""`--model-path RUN`: a run that begins with the newest model of another one, as the
next of several stages.

Invariant: which model that is, is settled once, when the run is started, and written
into its configuration. The other run may go on and save newer ones."""

from pathlib import Path

from invrl.run.checkpoint import keep_model
from invrl.run.config import Config, is_run_folder


def with_models_of_runs(config: Config) -> Config:
    """The configuration with the checkpoint in the place of the run that a model is
    taken from. That model is not removed from now on. A run that has saved none stays
    as it is, for a check to refuse."""
    model = config.model
    settled: dict[str, str] = {}
    for name, folder in (
        ("model_path", model.folder),
        ("reference_model_path", model.reference_folder),
        ("critic_model_path", model.critic_folder),
    ):
        path = getattr(model, name)
        if (
            not path
            or not is_run_folder(Path(path).expanduser().absolute())
            or is_run_folder(folder)
        ):
            continue
        keep_model(folder)
        settled[name] = str(folder.parent if folder.name == "hugging_face" else folder)
    if not settled:
        return config
    return config.model_copy(update={"model": model.model_copy(update=settled)})
