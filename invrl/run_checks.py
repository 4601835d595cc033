"""What the settings of a run name, looked at before any process starts: model, user code, tasks, options of
other packages, port, machine.

Each check raises ConfigError with the fix. `check_run` makes those that a command needs and is called by
`cli.py`; `doctor.py` calls them one by one.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from invrl.config import Config
from invrl.errors import ConfigError, InvrlError


def check_run(config: Config, *, trains: bool = False, evaluates: bool = False) -> None:
    """Raises ConfigError for the first thing that a run with these settings could not start with."""
    check_model(config)
    if trains:
        check_trainable(config)
        check_user_code(config)
        check_world(config, cpus=len(os.sched_getaffinity(0)))
        check_saved(config)
    if evaluates:
        check_evaluated_code(config)
    check_upstream(config)
    if not config.run.debug_train_only:
        check_port(config)


def check_model(config: Config) -> None:
    """The folder's files, and that its tokenizer and template make ids of a conversation."""
    check_model_files(config)
    check_template(config)


def check_model_files(config: Config) -> None:
    from invrl.model_folder import check_model_folder

    check_model_folder(model_path(config))


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


def check_trainable(config: Config) -> None:
    """The trainer computes this model as its config.json describes it."""
    from invrl.train.hf_config import read_hf_config

    read_hf_config(model_path(config))


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


def check_upstream(config: Config) -> None:
    """Options that pass through, against the installed packages' own definitions; slow to import.
    Raises ConfigError."""
    if not config.run.debug_train_only:
        check_sglang_options(config)
        check_router_options(config)
    check_megatron_options(config)


def check_sglang_options(config: Config) -> None:
    from invrl.rollout.sglang_args import sglang_flags

    sglang_flags({name: str(value) for name, value in config.sglang.items()})


def check_router_options(config: Config) -> None:
    from invrl.rollout.sglang_args import router_flags

    router_flags({name: str(value) for name, value in config.router.items()})


def check_megatron_options(config: Config) -> None:
    if not config.megatron:
        return
    from invrl.train import megatron_args
    from invrl.train.hf_config import read_hf_config

    layers = read_hf_config(model_path(config)).num_layers if config.model.model_path else 1024
    megatron_args.check_megatron_options(config.megatron, num_layers=layers)


def check_user_code(config: Config) -> None:
    """Everything given by import path, the tasks, and the trackers: imported, called as far as checks go.
    Raises ConfigError (PluginError)."""
    from invrl.metric_sinks import check_trackers

    check_trackers(config.run)
    check_algorithm_code(config)
    if config.rollout.eval_sets and not config.rollout.eval_tasks:
        raise ConfigError(
            field="rollout.eval_sets",
            value=config.rollout.eval_sets,
            reason="no evaluation is asked for (eval_tasks is 0)",
            fix="set --eval-tasks, or leave --eval-sets out",
        )
    if not config.run.debug_train_only:
        check_evaluated_code(config, unnamed=False)
        check_tasks(config)


def check_evaluated_code(config: Config, *, unnamed: bool = True) -> None:
    """What an evaluation needs of it: the rollout and reward functions and every held-out set (the one
    without a name only if `unnamed`)."""
    from invrl.rollout.eval_sets import load_eval_sets

    check_rollout_function(config)
    check_reward_function(config)
    if unnamed or config.rollout.eval_sets:
        load_eval_sets(config.rollout, config.run.seed)


def check_saved(config: Config) -> None:
    """The batches and the checkpoint that `--debug-train-only` begins with. Raises ConfigError."""
    if config.run.debug_train_only:
        from invrl.batch_file import saved_steps
        from invrl.checkpoints import first_checkpoint

        begin = first_checkpoint(config.run.load_checkpoint)
        folder = Path(config.run.load_rollout_data).expanduser().absolute()
        saved_steps(folder, after_step=begin.step if begin else 0)


def check_rollout_function(config: Config) -> None:
    from invrl import plugins

    plugins.load_rollout_function(config.rollout.rollout_function_path)


def check_reward_function(config: Config) -> None:
    from invrl import plugins

    if config.rollout.reward_function_path:
        plugins.load_reward_function(config.rollout.reward_function_path)


def check_tasks(config: Config) -> None:
    from invrl.rollout import tasks

    tasks.check_tasks(config.rollout, config.run.seed)


def check_algorithm_code(config: Config) -> None:
    from invrl.algorithms.advantages import advantage_function
    from invrl.algorithms.surrogates import surrogate_function
    from invrl.buffer.policies import group_filter_function

    group_filter_function(config.buffer.group_filter)
    advantage_function(config.algorithm.advantage)
    surrogate_function(config.algorithm.policy_loss)
