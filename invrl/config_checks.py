"""What single fields cannot know: contradictions between settings, found before any process starts.

One function per subject, each raising ConfigError with the fix. `check` is pure and is called by
`config.resolve`. `check_run` looks at what the settings name (model, user code, tasks, options of other
packages, port, machine); `cli.py` calls it before a run. `doctor.py` makes its checks one by one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from invrl.errors import ConfigError, InvrlError

if TYPE_CHECKING:
    from invrl.config import Config

_SECRET_PARTS = ("api_key", "password", "secret", "auth_token")
_MAX_COUNT = 2**31 - 1


def check(config: Config) -> None:
    """Raises ConfigError at the first contradiction."""
    _check_batch(config)
    _check_evaluation(config)
    _check_sampling(config)
    _check_engines(config)
    _check_deadlines(config)
    _check_upstream_names(config)
    _check_sizes(config)


def _check_batch(config: Config) -> None:
    groups, samples = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    ranks, steps = config.train.data_parallel_size, config.algorithm.steps_per_batch
    if groups * samples < ranks:
        raise ConfigError(
            field="train.data_parallel_size",
            value=ranks,
            reason=f"a batch has {groups} x {samples} = {groups * samples} rollouts, fewer than ranks",
            fix="lower --data-parallel-size or raise --rollout-batch-size",
        )
    if steps > groups:
        raise ConfigError(
            field="algorithm.steps_per_batch",
            value=steps,
            reason=f"a mini-batch is made of whole groups, and a batch has {groups}",
            fix="lower --steps-per-batch or raise --rollout-batch-size",
        )
    if samples == 1 and config.algorithm.advantage in ("grpo", "dr_grpo"):
        raise ConfigError(
            field="rollout.n_samples_per_prompt",
            value=samples,
            reason=f"{config.algorithm.advantage} compares the rollouts of a group; with one, every "
            "advantage is 0",
            fix="set --n-samples-per-prompt to 2 or more",
        )


def _check_evaluation(config: Config) -> None:
    if config.rollout.eval_interval and not config.rollout.eval_tasks:
        raise ConfigError(
            field="rollout.eval_interval",
            value=config.rollout.eval_interval,
            reason="there are no held-out tasks to evaluate on (eval_tasks is 0)",
            fix="set --eval-tasks, or --eval-interval 0",
        )


def _check_sampling(config: Config) -> None:
    if config.rollout.max_new_tokens >= config.engine.engine_max_total_tokens:
        raise ConfigError(
            field="rollout.max_new_tokens",
            value=config.rollout.max_new_tokens,
            reason=f"an engine's KV cache holds {config.engine.engine_max_total_tokens} tokens in all",
            fix="lower --max-new-tokens or raise --engine-max-total-tokens",
        )


def _check_engines(config: Config) -> None:
    if config.rollout.rollout_concurrency > config.gateway.max_open_sessions:
        raise ConfigError(
            field="rollout.rollout_concurrency",
            value=config.rollout.rollout_concurrency,
            reason=f"the gateway admits {config.gateway.max_open_sessions} open sessions",
            fix="lower --rollout-concurrency or raise --max-open-sessions",
        )
    if config.rollout.rollout_workers > config.rollout.rollout_concurrency:
        raise ConfigError(
            field="rollout.rollout_workers",
            value=config.rollout.rollout_workers,
            reason=f"only {config.rollout.rollout_concurrency} rollouts run at a time",
            fix="lower --rollout-workers or raise --rollout-concurrency",
        )
    if config.gateway.gateway_port > 65535:
        raise ConfigError(
            field="gateway.gateway_port",
            value=config.gateway.gateway_port,
            reason="ports end at 65535",
            fix="choose a port up to 65535, or 0 for a free one",
        )


def _check_deadlines(config: Config) -> None:
    """What waits for a rollout must wait longer than a rollout may take."""
    limit = config.rollout.rollout_timeout_s
    for field, value in (
        ("gateway.session_ttl_s", config.gateway.session_ttl_s),
        ("buffer.batch_timeout_s", config.buffer.batch_timeout_s),
    ):
        if value < limit:
            raise ConfigError(
                field=field,
                value=value,
                reason=f"a rollout may take rollout_timeout_s = {limit:g} s",
                fix=f"raise --{field.partition('.')[2].replace('_', '-')} or lower --rollout-timeout-s",
            )


def _check_upstream_names(config: Config) -> None:
    """The resolved configuration is written down, so it must hold no secret."""
    tables = {"sglang": config.sglang, "router": config.router, "megatron": config.megatron}
    for table, options in tables.items():
        for name in options:
            if any(part in name for part in _SECRET_PARTS):
                raise ConfigError(
                    field=f"{table}.{name}",
                    value="(not shown)",
                    reason="invrl makes the keys of its private servers itself, anew for each run",
                    fix=f"leave --{table}-{name.replace('_', '-')} out",
                )


def _check_sizes(config: Config) -> None:
    """Counts travel as int32 (token ids, positions, versions)."""
    for table in type(config).model_fields:
        section = getattr(config, table)
        for name, value in section if not isinstance(section, dict) else section.items():
            if isinstance(value, int) and abs(value) > _MAX_COUNT:
                raise ConfigError(
                    field=f"{table}.{name}",
                    value=value,
                    reason="over 2^31 - 1",
                    fix="choose a smaller number",
                )


def check_run(config: Config, *, trains: bool) -> None:
    """Raises ConfigError for the first thing that a run with these settings could not start with."""
    serves = ("model folder", "chat template", *_UPSTREAM, "gateway port")
    for name, check in run_checks(config).items():
        if trains or name in serves:
            check()
    if trains:
        check_world(config, cpus=len(os.sched_getaffinity(0)))


_UPSTREAM = ("sglang options", "router options", "megatron options")


def check_upstream(config: Config) -> None:
    """Options that pass through, against the installed packages' own definitions; slow to import."""
    for name in _UPSTREAM:
        run_checks(config)[name]()


def check_user_code(config: Config) -> None:
    """Everything given by import path, and the tasks: imported, called as far as checks go."""
    for name in ("rollout function", "reward function", "tasks", "algorithm functions"):
        run_checks(config)[name]()


def run_checks(config: Config) -> dict[str, Callable[[], object]]:
    """By name: each raises ConfigError (PluginError), or returns what it saw."""
    from invrl import model_folder, plugins
    from invrl.algorithms.advantages import advantage_function
    from invrl.algorithms.surrogates import surrogate_function
    from invrl.buffer.policies import group_filter_function
    from invrl.rollout import sglang_args, tasks
    from invrl.train.hf_config import read_hf_config

    rollout, algorithm = config.rollout, config.algorithm
    reward = rollout.reward_function_path
    return {
        "model folder": lambda: model_folder.check_model_folder(model_path(config)) or model_path(config),
        "chat template": lambda: check_template(config),
        "trainable model": lambda: read_hf_config(model_path(config)).model_type,
        "rollout function": lambda: plugins.load_rollout_function(rollout.rollout_function_path),
        "reward function": lambda: plugins.load_reward_function(reward) if reward else "none",
        "tasks": lambda: tasks.check_tasks(rollout, config.run.seed),
        "algorithm functions": lambda: (
            advantage_function(algorithm.advantage),
            surrogate_function(algorithm.policy_loss),
            group_filter_function(config.buffer.group_filter),
        ),
        "sglang options": lambda: sglang_args.sglang_flags({k: str(v) for k, v in config.sglang.items()}),
        "router options": lambda: sglang_args.router_flags({k: str(v) for k, v in config.router.items()}),
        "megatron options": lambda: check_megatron_options(config),
        "gateway port": lambda: check_port(config),
    }


def check_template(config: Config) -> None:
    """As the gateway renders: a first request, and one that follows a reply."""
    from invrl.gateway.forest import Message
    from invrl.gateway.model_folder import load_renderer

    path = model_path(config)
    chat = [Message(role=role, content="a word") for role in ("user", "assistant", "user")]
    try:
        renderer = load_renderer(str(path), 2**31)
        ids = renderer.first(chat[:1]) and renderer.first(chat)
    except ConfigError:
        raise
    except Exception as error:  # templates raise what they like, the tokenizer bare Exceptions
        raise ConfigError(
            field="model.model_path",
            value=str(path),
            reason=str(error) if isinstance(error, InvrlError) else f"no conversation renders: {error!r}",
            fix="repair chat_template.jinja (or chat_template in tokenizer_config.json)",
        ) from error
    if not ids:
        raise ConfigError(
            field="model.model_path",
            value=str(path),
            reason="the chat template renders a conversation to nothing",
            fix="choose an instruct model, or write another chat_template.jinja",
        )


def model_path(config: Config) -> Path:
    """Raises ConfigError if none is given."""
    if not config.model.model_path:
        raise ConfigError(
            field="model.model_path",
            value="",
            reason="no model was given",
            fix="give --model-path FOLDER; `invrl prepare-model --help` shows how to make one",
        )
    return Path(config.model.model_path).expanduser().absolute()


def check_world(config: Config, *, cpus: int) -> None:
    """A rank computes on a GPU, or a CPU, of its own; those of a cluster elsewhere are not known here."""
    from invrl.rollout.engine_server import count_gpus

    ranks, gpus = config.train.data_parallel_size, count_gpus()
    have, what = (gpus, "GPUs") if gpus else (cpus, "CPUs")
    if ranks > have and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            field="train.data_parallel_size",
            value=ranks,
            reason=f"this machine has {have} {what}, and every rank needs one of its own",
            fix=f"lower --data-parallel-size to {have} or less",
        )


def check_port(config: Config) -> None:
    """Nobody listens where the gateway will."""
    host, port = config.gateway.gateway_host, config.gateway.gateway_port
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        taken = isinstance(error, PermissionError) or "in use" in str(error)
        raise ConfigError(
            field=f"gateway.gateway_{'port' if taken else 'host'}",
            value=port if taken else host,
            reason=f"the gateway cannot listen on {host}:{port} ({error.strerror})",
            fix="choose another --gateway-port, or 0 for a free one"
            if taken
            else "give an address of this machine as --gateway-host (127.0.0.1, or 0.0.0.0 for all)",
        ) from error


def check_megatron_options(config: Config) -> None:
    if config.megatron:
        from invrl.train import megatron_args
        from invrl.train.hf_config import read_hf_config

        layers = read_hf_config(model_path(config)).num_layers if config.model.model_path else 1024
        megatron_args.check_megatron_options(config.megatron, num_layers=layers)
