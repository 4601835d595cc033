"""Whether the files of a run without rollouts can be trained on: every row is read, and many are tokenised
with the model's own template. Raises ConfigError that names the file and the row."""

from invrl.errors import ConfigError
from invrl.run.config import Config


def check_data(config: Config) -> str:
    """Returns how many rows of which kind there are, and how long they are."""
    from invrl.run.data import load_run_data

    if not config.trains_on_data:
        return "none: the run trains on rollouts"
    _check_objective(config)
    try:
        return load_run_data(config).check_tokens()
    except ConfigError:
        raise
    except ImportError as error:  # transformers looks for jinja2 when it renders
        from invrl.cli.checks.machine_checks import packages_missing

        raise packages_missing(error) from error


def _check_objective(config: Config) -> None:
    """It is built in, or a function that can be called as one. Raises PluginError."""
    from invrl.algorithms.objectives import objective_of

    objective_of(config.algorithm)
