"""All settings: one tree of frozen sections, each declared beside its owner, composed
here.

Values come from these sources, later ones win: defaults, the algorithm preset, a TOML
file, flags (`resolve`). Invariant: `resolve` returns a whole and consistent
configuration, or raises a ConfigError that says what to change; nothing has started by
then. Imports without torch, ray, sglang or transformers."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import tomli_w
from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationError,
)

from invrl.algorithms.config import AlgorithmConfig
from invrl.buffer.config import BufferConfig
from invrl.datasets.config import DataConfig
from invrl.engines.config import EngineConfig
from invrl.errors import ConfigError
from invrl.gateway.config import GatewayConfig
from invrl.host.log_lines import LogFormat, LogLevel, LogSettings
from invrl.rollout.config import RolloutConfig
from invrl.run.checkpoint_scores import ScoreKind
from invrl.run.contradictions import check
from invrl.run.name_suggestions import (
    answer_without_setting,
    meant_setting,
    nearest,
    nearest_setting,
)
from invrl.run.value_suggestions import value_fix
from invrl.section import COMMA_SEPARATED, Section
from invrl.store.run_folder import CONFIG_NAME, RunFolder
from invrl.train.config import TrainConfig
from invrl.weights.config import WeightSyncConfig

Scalar = StrictBool | StrictInt | StrictFloat | str
"""What a pass-through option or a flag can be."""
UpstreamOptions = dict[str, Scalar]


class RunConfig(Section):
    """The run as a whole: its name, length and what it shows."""

    run_name: str = Field(
        "", description="name of the run folder; empty: the time it starts"
    )
    run_root: str = Field("runs", description="folder that run folders are made in")
    num_steps: PositiveInt = Field(
        100, description="training batches, one weight version each"
    )
    seed: NonNegativeInt = Field(
        0, description="seed of task order, shuffles and initial values"
    )
    save_interval: NonNegativeInt = Field(
        0, description="steps between checkpoints; 0: by save_interval_s"
    )
    save_interval_s: float = Field(
        300.0,
        ge=0,
        description="seconds between checkpoints, more where saving would take over 5 % of the time; 0: none "
        "before the last step",
    )
    async_checkpoints: bool = Field(
        False,
        description="write checkpoints beside training, from a copy in memory while one is written: 16 bytes "
        "a parameter (float32: 20), on the first rank of each data-parallel group",
    )
    keep_checkpoints: NonNegativeInt = Field(
        2, description="newest checkpoints that stay; 0: all"
    )
    keep_best: NonNegativeInt = Field(
        0, description="best checkpoints that stay beside the newest, by --keep-best-by"
    )
    keep_best_by: Literal["auto", "held_out", "reward"] = Field(
        "auto",
        description="'held_out': mean held-out accuracy; 'reward': mean training reward of 8 steps; 'auto': "
        "held_out where eval_interval is set, else reward. On --data-path: by the held-out loss",
    )
    max_restarts: NonNegativeInt = Field(
        0, description="times in a row that a failed run resumes by itself"
    )
    heartbeat_timeout_s: float = Field(
        30.0,
        gt=0,
        description="a process that has not answered for this long counts as dead",
    )
    ray_start_attempts: PositiveInt = Field(
        4, description="times that a run's own Ray is started until it is up"
    )
    colocate: bool = Field(
        False,
        description="engines and trainer use the same GPUs by turns: engines give back their cache's memory "
        "while a step is trained, the trainer its gradients and optimizer while rollouts run",
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
    load_rollout_data: str = Field(
        "", description="folder of saved batches, for --debug-train-only"
    )
    load_checkpoint: str = Field(
        "", description="RUN/checkpoints/step-N that --debug-train-only begins with"
    )
    sample_interval_s: float = Field(
        5.0,
        ge=0,
        description="seconds between samples of engines, gateway and memory in RUN/timeline.jsonl; 0: none",
    )
    progress: Literal["auto", "plain", "none"] = Field(
        "auto", description="auto: live display on a terminal"
    )
    log_samples: NonNegativeInt = Field(
        1,
        description="rollouts of each step whose prompt, reply and reward the console shows; 0: none",
    )
    log_format: LogFormat = Field(
        "text", description="lines of logs/: text, or a JSON object each"
    )
    log_level: LogLevel = Field(
        "info", description="the least level that logs/ has of our own processes"
    )
    otel_endpoint: str = Field(
        "",
        description="OpenTelemetry collector that takes OTLP over HTTP, such as http://127.0.0.1:4318; "
        "empty: the one of OTEL_EXPORTER_OTLP_ENDPOINT, and without it no traces",
    )
    tensorboard: bool = Field(
        True, description="write TensorBoard events into the run folder"
    )
    wandb_project: str = Field(
        "", description="project at Weights & Biases to log to; empty: none"
    )
    wandb_mode: Literal["online", "offline"] = Field(
        "online", description="offline: files for `wandb sync`"
    )
    metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port at which the run shows its metrics for Prometheus; 0: none",
    )
    metrics_host: str = Field(
        "127.0.0.1",
        description="address at which metrics are shown, without a key; another than loopback shows them to "
        "everybody who reaches it",
    )
    wandb_rollouts: int = Field(
        0,
        ge=0,
        le=1000,
        description="rollouts of each step in a table at Weights & Biases; 0: no table",
    )
    mlflow_tracking_uri: str = Field(
        "", description="MLflow server or store to log to; empty: none"
    )

    def log_settings(self, run: str) -> LogSettings:
        """What the processes of the run of this name log, and how."""
        return LogSettings(run=run, format=self.log_format, level=self.log_level)


class ModelConfig(Section):
    """The model that is served and trained."""

    model_path: str = Field(
        "",
        description="Hugging Face folder, checkpoint of a run, or folder of a run (its newest model)",
    )

    served_model_name: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field(
        default=(),
        description="names under which clients call the model, answers have the first; may be given several "
        "times; empty: that of its folder (training sessions accept any)",
    )

    reference_model_path: str = Field(
        default="",
        description="folder or checkpoint with the weights of the frozen reference (kl_coef > 0), a model of "
        "the same shape; empty: those of model_path",
    )

    teacher_model_path: str = Field(
        default="",
        description="folder or checkpoint with the weights of a teacher that the trainer computes, a model "
        "of the same shape (objective distillation)",
    )
    teacher_url: str = Field(
        default="",
        description="http(s) URL of an SGLang server with a teacher of any shape and the same tokens "
        "(objective distillation); its key comes from INVRL_TEACHER_KEY",
    )
    teacher_timeout_s: PositiveFloat = Field(
        default=120.0,
        description="until the teacher at teacher_url has scored one row; it is asked three times",
    )
    teacher_concurrency: PositiveInt = Field(
        default=16,
        description="rows that the teacher at teacher_url scores at the same time",
    )
    critic_model_path: str = Field(
        default="",
        description="folder or checkpoint of the model that the critic begins as (advantage gae), a model of "
        "the same shape, without its projection to the vocabulary; empty: that of model_path",
    )

    @property
    def folder(self) -> Path:
        """Absolute; meaningless without a `model_path`."""
        return _model_folder(self.model_path)

    @property
    def reference_folder(self) -> Path:
        """Of the frozen reference: absolute; meaningless without a `model_path`."""
        return _model_folder(self.reference_model_path or self.model_path)

    @property
    def teacher_folder(self) -> Path | None:
        """Of a teacher that the trainer computes: absolute."""
        return (
            _model_folder(self.teacher_model_path) if self.teacher_model_path else None
        )

    @property
    def critic_folder(self) -> Path:
        """Of the critic: absolute; meaningless without a `model_path`."""
        return _model_folder(self.critic_model_path or self.model_path)

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which clients call the model; answers have the first."""
        return self.served_model_name or (self.name,)

    @property
    def name(self) -> str:
        """The name that the folder gives the model: for a checkpoint that of its run,
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


def _model_folder(path: str) -> Path:
    """The absolute folder of a model: of a checkpoint, its part for Hugging Face; of a
    run, its newest model. The folder of a run without a model is returned as it is."""
    folder = Path(path).expanduser().absolute()
    if is_run_folder(folder):
        from invrl.run.checkpoints import (
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


class Config(Section):
    """All settings of a run, made by `resolve()`. The options in `sglang`, `router` and
    `megatron` pass through to those packages by name."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    engine: EngineConfig
    gateway: GatewayConfig
    buffer: BufferConfig
    algorithm: AlgorithmConfig
    train: TrainConfig
    weight_sync: WeightSyncConfig
    sglang: UpstreamOptions = Field(default_factory=dict)
    router: UpstreamOptions = Field(default_factory=dict)
    megatron: UpstreamOptions = Field(default_factory=dict)

    @property
    def trains_on_data(self) -> bool:
        """Whether the run trains on a file, without rollouts."""
        return bool(self.data.data_path)

    @property
    def trains_alone(self) -> bool:
        """Whether the trainer is all that the run starts: no engine, no gateway and no
        rollouts."""
        return self.run.debug_train_only or self.trains_on_data

    @property
    def best_checkpoints_by(self) -> ScoreKind:
        """What `keep_best_by` stands for in this run."""
        if self.trains_on_data:
            return "held_out_loss"
        if self.run.keep_best_by != "auto":
            return self.run.keep_best_by
        return "held_out" if self.rollout.eval_interval else "reward"

    def to_toml(self) -> str:
        """The whole tree; `resolve` reads it back to an equal one."""
        return tomli_w.dumps(self.model_dump(mode="json"))


SECTIONS: dict[str, type[Section]] = {
    name: info.annotation
    for name, info in Config.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
}
UPSTREAM = tuple(name for name in Config.model_fields if name not in SECTIONS)
Tables = Mapping[str, Mapping[str, Scalar]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Values from one place, by table and key. Errors call that place `name`."""

    name: str
    tables: Tables


def read_toml(path: Path) -> Source:
    """A configuration file as a source. ConfigError for what is not TOML; `resolve`
    checks its names."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            "--config", str(path), str(error), "give a readable TOML file"
        ) from error
    for table, entries in document.items():
        if not isinstance(entries, dict):
            raise ConfigError(
                f"{table} in {path}", entries, "a table is expected", _table_fix(table)
            )
    return Source(name=str(path), tables=document)


def _table_fix(key: str) -> str:
    """For a key that stands outside of all tables."""
    table = _table_of(key)
    if table:
        return f"move it to table [{table}]"
    setting = meant_setting(key)
    answer = answer_without_setting(key)
    if answer:
        return answer
    if setting:
        return f"write it as {setting}, in table [{_table_of(setting)}]"
    return f"write [{key}] and its keys below"


def resolve(*sources: Source) -> Config:
    """The sources over the algorithm's preset over the defaults; later sources win.
    Raises ConfigError for a value that is not valid, and for values that contradict
    each other."""
    values: dict[str, dict[str, Scalar]] = {name: {} for name in SECTIONS}
    for source in sources:
        for table, entries in source.tables.items():
            values.setdefault(table, {}).update(entries)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        _refuse(error, sources)
    check(config)
    return config


def _refuse(error: ValidationError, sources: Sequence[Source]) -> NoReturn:
    """Raises the first of pydantic's findings as a ConfigError."""
    finding = error.errors()[0]
    location = [str(part) for part in finding["loc"]]
    table = location[0]
    key = location[1] if len(location) > 1 else ""
    known = Config.model_fields
    if table in SECTIONS:
        known = SECTIONS[table].model_fields

    reason = finding["msg"]
    fix = "give a string, a number or a boolean"
    if finding["type"] == "extra_forbidden" and key:
        reason = "no such key"
        fix = _key_fix(key, table)
    elif finding["type"] == "extra_forbidden":
        reason = "no such table"
        fix = nearest(table, known)
    elif key in known:
        fix = value_fix(key, finding["input"], known[key])
    reason += f" (from {_origin_of(table, key, sources)})"
    if error.error_count() > 1:
        reason += f" ({error.error_count() - 1} more)"
    field = f"{table}.{key}" if key else table
    raise ConfigError(field, finding["input"], reason, fix) from error


def _origin_of(table: str, key: str, sources: Sequence[Source]) -> str:
    """The name of the last source that sets the key; any key of the table if `key` is
    empty."""
    origin = "default"
    for source in sources:
        if table in source.tables and (not key or key in source.tables[table]):
            origin = source.name
    return origin


def _key_fix(key: str, table: str) -> str:
    """For a key that its table does not have."""
    right_table = _table_of(key)
    if right_table:
        return f"move it to table [{right_table}]"
    setting = meant_setting(key)
    if setting and _table_of(setting) != table:
        return f"did you mean {setting}, in table [{_table_of(setting)}]?"
    return nearest_setting(key, SECTIONS[table].model_fields)


def _table_of(key: str) -> str:
    """The table of a setting; "" if there is no such setting."""
    for table, section in SECTIONS.items():
        if key in section.model_fields:
            return table
    return ""
