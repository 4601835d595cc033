"""Checks before a run starts that its experiment trackers are installed and can be
logged to."""

from __future__ import annotations

import importlib.util
import logging
import re
from typing import TYPE_CHECKING

from invrl.errors import ConfigError

if TYPE_CHECKING:
    from invrl.run.settings.run_config import RunConfig

logger = logging.getLogger(__name__)
_PASSWORD_IN_URL = re.compile(r"://[^/@]*:[^/@]+@")


def check_trackers(run: RunConfig) -> None:
    """Raise ConfigError for a tracker that cannot be logged to."""
    if _PASSWORD_IN_URL.search(
        run.metrics.mlflow_tracking_uri or ""
    ):  # settings are written into the run folder
        fix = "leave it out; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
        raise ConfigError(
            "metrics.mlflow_tracking_uri", "(not shown)", "it holds a password", fix
        )
    if run.wandb is not None:
        _check_installed("wandb", "wandb.project", run.wandb.project)
    if run.metrics.mlflow_tracking_uri:
        _check_installed(
            "mlflow", "metrics.mlflow_tracking_uri", run.metrics.mlflow_tracking_uri
        )
        _check_mlflow(run.metrics.mlflow_tracking_uri)
    if run.wandb is not None and run.wandb.mode == "online":
        _check_wandb_key()


def _check_installed(package: str, field: str, value: str) -> None:
    spec = importlib.util.find_spec(package)
    if (
        spec is None or spec.origin is None
    ):  # no origin: a folder of that name, not a package
        raise ConfigError(
            field,
            value,
            f"the package {package} is not installed",
            f"pip install {package}",
        )


def _check_wandb_key() -> None:
    import wandb

    has_key = True
    try:
        has_key = wandb.login(prompt=False)
    except Exception as error:
        # no network, or the key is refused: the sink will report that
        logger.warning("Weights & Biases: %s", error)
    if not has_key:
        reason = "there is no API key for Weights & Biases"
        fix = "set WANDB_API_KEY, run `wandb login`, or give --wandb.mode offline"
        raise ConfigError("wandb.mode", "online", reason, fix)


def _check_mlflow(uri: str) -> None:
    """Check what can be checked without a server. MLflow takes any text for a folder,
    and fails only at its first write: it no longer writes to folders, and mlflow-skinny
    has no databases."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        MlflowClient(tracking_uri=uri)
    except (MlflowException, ImportError) as error:
        first_sentence = str(error).strip().partition(". ")[0]
        reason = f"MLflow would log nothing there: {first_sentence}"
        fix = (
            "give the http:// address of a tracking server (`mlflow server`, of the package mlflow); or "
            "sqlite:///FILE, which needs the package mlflow too (mlflow-skinny has no databases); or set "
            "MLFLOW_ALLOW_FILE_STORE=true for a folder"
        )
        raise ConfigError("metrics.mlflow_tracking_uri", uri, reason, fix) from error
