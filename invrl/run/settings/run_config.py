"""Settings of a run as a whole, and of its model."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from invrl.errors import ConfigError
from invrl.host.output.log_lines import LogFormat, LogLevel, LogSettings
from invrl.store.run_folder import CONFIG_NAME, RunFolder
from invrl.types.section import COMMA_SEPARATED, Section, Text

_ADAPTER = re.compile(r"([\w./-]{1,64})=(.+)")


class WandbConfig(Section):
    """Metrics at Weights & Biases."""

    project: Text = Field(description="project to log to")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: files for `wandb sync`"
    )
    rollouts: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None, description="rollouts of each step in a table"
    )


class CheckpointsConfig(Section):
    """When a run writes checkpoints, and which of them stay."""

    interval_s: PositiveFloat | None = Field(
        300.0,
        description="seconds between checkpoints, more where saving would take over 5 % of the time; "
        "--no-checkpoints.interval-s: none before the last step",
    )
    background: bool = Field(
        False,
        description="write checkpoints beside training, from a copy in memory while one is written: 16 bytes "
        "a parameter (float32: 20), on the first rank of each data-parallel group",
    )
    keep: PositiveInt | None = Field(
        2, description="newest checkpoints that stay; --no-checkpoints.keep: all"
    )
    keep_best: PositiveInt | None = Field(
        None,
        description="best checkpoints that stay beside the newest, by --checkpoints.keep-best-by",
    )
    keep_best_by: Literal["auto", "held_out", "reward"] = Field(
        "auto",
        description="'held_out': mean held-out accuracy; 'reward': mean training reward of 8 steps; 'auto': "
        "held_out where eval.interval is set, else reward. On --data-path: by the held-out loss",
    )


class LogConfig(Section):
    """Output of a run on the console and in logs."""

    format: LogFormat = Field(
        "text", description="lines of logs/: text, or a JSON object each"
    )
    level: LogLevel = Field(
        "info", description="the least level that logs/ has of our own processes"
    )
    samples: PositiveInt | None = Field(
        1,
        description="rollouts of each step whose prompt, reply and reward the console shows",
    )
    progress: Literal["auto", "plain", "none"] = Field(
        "auto", description="auto: live display on a terminal"
    )
    otel_endpoint: Text | None = Field(
        None,
        description="OpenTelemetry collector that takes OTLP over HTTP, such as http://127.0.0.1:4318; "
        "left out: the one of OTEL_EXPORTER_OTLP_ENDPOINT, and without it no traces",
    )


class MetricsConfig(Section):
    """Destinations of the metrics of a run."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None,
        description="port at which the run shows its metrics for Prometheus",
    )
    host: str = Field(
        "127.0.0.1",
        description="address at which metrics are shown, without a key; another than loopback shows them to "
        "everybody who reaches it",
    )
    sample_interval_s: PositiveFloat | None = Field(
        5.0,
        description="seconds between samples of engines, gateway and memory in RUN/timeline.jsonl",
    )
    tensorboard: bool = Field(
        True, description="write TensorBoard events into the run folder"
    )
    mlflow_tracking_uri: Text | None = Field(
        None, description="MLflow server or store to log to"
    )


class PlacementConfig(Section):
    """Roles on other nodes of the Ray that RAY_ADDRESS names. A role that is left out
    is on the driver's node, as is everything else."""

    engines: Text | None = Field(
        None,
        description="nodes of the engines: a label (KEY=VALUE), a node's name or its address",
    )
    trainer: Text | None = Field(
        None,
        description="nodes of the trainer's ranks, in the same way; they and the driver share the run folder",
    )
    rollout_workers: Text | None = Field(
        None,
        description="nodes of the rollout workers, in the same way; they reach the gateway at gateway.host",
    )


class RunConfig(Section):
    """The run as a whole: its name, its length and its output."""

    run_name: Text | None = Field(
        None, description="name of the run folder; left out: the time it starts"
    )
    run_root: str = Field("runs", description="folder that run folders are made in")
    num_steps: PositiveInt = Field(
        100, description="training batches, one weight version each"
    )
    seed: NonNegativeInt = Field(
        0, description="seed of task order, shuffles and initial values"
    )
    save_interval: PositiveInt | None = Field(
        None,
        description="steps between checkpoints; left out: by checkpoints.interval_s",
    )
    max_restarts: NonNegativeInt = Field(
        0, description="times in a row that a failed run resumes by itself"
    )
    heartbeat_timeout_s: float = Field(
        30.0,
        gt=0,
        description="a process that has not answered for this long counts as dead",
    )
    colocate: bool | None = Field(
        None,
        description="engines and trainer use the same GPUs by turns: engines give back their cache's memory "
        "while a step is trained, the trainer its gradients and optimizer while rollouts run; left out: where "
        "a run does not fit otherwise",
    )
    save_rollout_data: bool = Field(
        False, description="write every training batch to RUN/rollout_data"
    )
    debug_rollout_only: bool = Field(
        False, description="no trainer; every batch goes to RUN/rollout_data"
    )
    debug_train_only: bool = Field(
        False, description="the trainer alone, on --load-rollout-data"
    )
    load_rollout_data: Text | None = Field(
        None, description="folder of saved batches, for --debug-train-only"
    )
    load_checkpoint: Text | None = Field(
        None, description="RUN/checkpoints/step-N that --debug-train-only begins with"
    )
    checkpoints: CheckpointsConfig = CheckpointsConfig.model_validate({})
    log: LogConfig = LogConfig.model_validate({})
    metrics: MetricsConfig = MetricsConfig.model_validate({})
    wandb: WandbConfig | None = Field(None, description="metrics at Weights & Biases")
    placement: PlacementConfig | None = Field(
        None, description="roles on other nodes of a Ray cluster"
    )

    def log_settings(self, run: str) -> LogSettings:
        """Return the log settings of the processes of the run of this name."""
        return LogSettings(run=run, format=self.log.format, level=self.log.level)


class ModelConfig(Section):
    """The model that is served and trained."""

    model_path: Text | None = Field(
        None,
        description="Hugging Face folder, checkpoint of a run, or folder of a run (its newest model)",
    )

    served_model_name: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field(
        default=(),
        description="names under which clients call the model, answers have the first; may be given several "
        "times; empty: that of its folder (training sessions accept any)",
    )

    adapter: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field(
        default=(),
        description="`invrl serve`: adapters of the model, each NAME=FOLDER (PEFT), which clients choose by NAME; "
        "may be given several times",
    )

    reference_model_path: Text | None = Field(
        default=None,
        description="folder or checkpoint with the weights of the frozen reference, a model of "
        "the same shape; left out: those of model_path",
    )

    @property
    def folder(self) -> Path:
        """Absolute model folder; meaningless without a `model_path`."""
        return model_folder(self.model_path or "")

    @property
    def reference_folder(self) -> Path:
        """Absolute folder of the frozen reference; meaningless without a
        `model_path`."""
        return model_folder(self.reference_model_path or self.model_path or "")

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which clients call the model; replies have the first."""
        return self.served_model_name or (self.name,)

    @property
    def adapters(self) -> dict[str, Path]:
        """Absolute PEFT folders by the names of their adapters. Raises ConfigError for
        an entry that is not NAME=FOLDER, and for a name that is given twice."""
        folders: dict[str, Path] = {}
        for entry in self.adapter:
            match = _ADAPTER.fullmatch(entry)
            fix = "write --adapter NAME=FOLDER, NAME of letters, digits, '.', '_', '-', '/'"
            if match is None:
                raise ConfigError("model.adapter", entry, "not NAME=FOLDER", fix)
            name = match[1]
            if name in folders or name in self.names:
                reason = f"the name {name} is that of another adapter, or of the model"
                raise ConfigError("model.adapter", entry, reason, "choose another name")
            folders[name] = Path(match[2]).expanduser().absolute()
        return folders

    @property
    def name(self) -> str:
        """Name that the folder gives the model: for a checkpoint that of its run,
        otherwise its own."""
        checkpoint = self.folder
        if checkpoint.name == "hugging_face":
            checkpoint = checkpoint.parent
        run = checkpoint.parent.parent
        if checkpoint.parent.name == "checkpoints" and is_run_folder(run):
            return run.name
        return checkpoint.name


def is_run_folder(folder: Path) -> bool:
    return (folder / CONFIG_NAME).is_file()


def model_folder(path: str) -> Path:
    """Return the absolute folder of a model: of a checkpoint, its Hugging Face part; of
    a run, its newest model. The folder of a run without a model is returned as it
    is."""
    folder = Path(path).expanduser().absolute()
    if is_run_folder(folder):
        from invrl.run.checkpoints.checkpoints import (
            Checkpoints,
        )  # many commands read settings and no checkpoint

        return (
            Checkpoints(RunFolder(path=folder).checkpoints_path).newest_model()
            or folder
        )
    of_checkpoint = folder / "hugging_face"
    if of_checkpoint.is_dir():
        return of_checkpoint
    return folder
