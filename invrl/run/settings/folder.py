"""Makes and checks the folder of a run.

Invariants: a folder belongs to one configuration, and is refused to another. Only its
owner can access a new folder, which protects the conversations, keys and tokens below
it.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from invrl.errors import ConfigError
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.run.settings.config import UPSTREAM, Config
from invrl.run.settings.resolved_config import load_resolved, write_resolved
from invrl.store.run_folder import LOCK_NAME, RunFolder, unwritable

_OWNER_ONLY = 0o700


def check_run_folder(config: Config) -> None:
    """Raise what `hold_run_folder` would raise, without creating anything."""
    root, name = _place(config)
    if (root / name).is_dir() and name:
        folder = RunFolder(path=root / name)
        _check_configuration(folder, config)
        folder.check_free()
    while not root.exists():
        root = root.parent
    try:
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        raise unwritable(root, error) from error


def starts_at_checkpoint(config: Config) -> bool:
    """Whether the run would start at a checkpoint, of its folder or of
    `--load-checkpoint`."""
    if config.run.debug_train_only:
        return config.run.load_checkpoint is not None
    root, name = _place(config)
    checkpoints = Checkpoints(RunFolder(path=root / name).checkpoints_path)
    return bool(name) and checkpoints.latest() is not None


@contextmanager
def hold_run_folder(config: Config, command: str) -> Iterator[RunFolder]:
    """Hold the folder of `make_run_folder` for `command` of this process. Raises
    ConfigError as that does, and if another process holds the folder, which is then
    unchanged."""
    folder = _find_or_create(config)
    with folder.held(command):
        _write_first_files(folder, config)
        yield folder


def make_run_folder(config: Config) -> RunFolder:
    """Create the folder (or reopen that of the same configuration) and write the
    configuration. Raises ConfigError if the folder holds another configuration, or
    files that are not a run's."""
    folder = _find_or_create(config)
    _write_first_files(folder, config)
    return folder


def _find_or_create(config: Config) -> RunFolder:
    root, name = _place(config)
    # Two runs of the same second get two folders.
    path = root / (name or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True, mode=_OWNER_ONLY)
        folder = RunFolder(path=path)
        _check_configuration(folder, config)
    except OSError as error:
        raise unwritable(root, error) from error
    return folder


def _write_first_files(folder: RunFolder, config: Config) -> None:
    try:
        for path in (folder.logs_path, folder.checkpoints_path, folder.report_path):
            path.mkdir(exist_ok=True)
        write_resolved(folder.config_path, config)
    except OSError as error:
        raise unwritable(folder.path.parent, error) from error


def _place(config: Config) -> tuple[Path, str]:
    """Return root and name. Raises ConfigError for a name that is a path."""
    name = config.run.run_name or ""
    if Path(name).name != name or name in (".", ".."):
        raise ConfigError(
            "run.run_name", name, "a name, not a path", "give the folder as --run-root"
        )
    return Path(config.run.run_root).expanduser().absolute(), name


def _check_configuration(folder: RunFolder, config: Config) -> None:
    if not folder.config_path.exists():
        # A process that has just begun holds the folder before it writes anything else.
        if any(path.name != LOCK_NAME for path in folder.path.iterdir()):
            reason = f"{folder.path} is not empty and is not a run folder"
            raise ConfigError(
                "run.run_name", folder.path.name, reason, "choose another --run-name"
            )
        return
    old_values = _fixed_settings(load_resolved(folder.config_path))
    changed: list[str] = []
    values = _fixed_settings(config)
    for name in {**old_values, **values}:
        old = old_values.get(name, "absent")
        value = values.get(name, "absent")
        if old != value:
            changed.append(f"{name} = {value!r}, not {old!r}")
    if changed:
        reason = f"{folder.path} holds a run with another configuration; now: {'; '.join(changed[:3])}"
        fix = "choose another --run-name, or repeat that configuration"
        raise ConfigError("run.run_name", folder.path.name, reason, fix)


_MAY_CHANGE = frozenset(
    {
        "run.run_root",
        "run.run_name",
        "run.num_steps",
        "data.epochs",
        "log.progress",
        "log.samples",
        "wandb.rollouts",
        "metrics.port",
        "metrics.host",
        "metrics.tensorboard",
        "train.record_trained_tokens",
        "metrics.sample_interval_s",
        "run.max_restarts",
        "run.save_interval",
        "run.colocate",
        "checkpoints.background",
        "checkpoints.interval_s",
        "checkpoints.keep",
        "checkpoints.keep_best",
        "checkpoints.keep_best_by",
        "train.max_shard_gb",
        "engine.external_engines",
        "placement.engines",
        "placement.trainer",
        "placement.rollout_workers",
        "failures.max_identical",
        "failures.max_at_start",
        "buffer.max_filtered_batches",
        "buffer.filtered_out",
    }
)
"""Settings that may differ when a run resumes: none changes what a step computes."""
_MAY_CHANGE_ROUNDING = frozenset(
    {
        "train.data_parallel_size",
        "train.tensor_model_parallel_size",
        "train.context_parallel_size",
        "critic.data_parallel_size",
        "train.pipeline_model_parallel_size",
        "train.num_layers_in_first_pipeline_stage",
        "train.num_layers_in_last_pipeline_stage",
        "train.virtual_pipeline_model_parallel_size",
        "train.expert_model_parallel_size",
        "train.max_tokens_per_micro_batch",
        "train.optimizer_cpu_offload",
        "train.share_prefixes",
        "train.reference_placement",
    }
)
"""Settings that may also differ, so that a run can continue with other ranks or less
memory: any layout can load a checkpoint. They change the order in which numbers are
added."""


def _fixed_settings(config: Config) -> dict[str, object]:
    """Return the settings that may not differ. A setting newer than the folder had its
    default there."""
    fixed: dict[str, object] = {}
    for table, entries in config.settings().items():
        if table in UPSTREAM:
            fixed[table] = entries
            continue
        for key, value in entries.items():
            name = f"{table}.{key}"
            if name not in _MAY_CHANGE | _MAY_CHANGE_ROUNDING:
                fixed[name] = value
    return fixed
