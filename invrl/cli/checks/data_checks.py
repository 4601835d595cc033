"""Checks the files of a run without rollouts: every row is read, and many are tokenised
with the model's own template. Raises ConfigError that names the file and the row."""

from invrl.cli.checks.check_warnings import CheckWarning
from invrl.run.settings.config import Config


def check_data(config: Config) -> str:
    """Check the data. Returns the number of rows by kind, and their lengths."""
    from invrl.algorithms.objectives.objectives import load_objective
    from invrl.run.incarnations.data import load_run_data

    if not config.trains_on_data:
        return "none: the run trains on rollouts"
    load_objective(config.algorithm)  # raises PluginError
    data = load_run_data(config)
    text = data.check_tokens()
    shared = data.shared_rows()
    if shared:
        reason = f"{shared:,} of {len(data.held_out):,} held-out rows are trained on too, so their loss says "
        reason += "nothing about new rows"
        field = "eval_path" if config.data.eval_path else "eval_fraction"
        fix = "hold out other rows, or remove the copies from the file"
        raise CheckWarning(f"data.{field}", getattr(config.data, field), reason, fix)
    return text
