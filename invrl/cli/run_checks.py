"""What the settings of a run name, looked at before any process starts: model, user code, tasks, options of
other packages, port, machine.
`check_run` makes the checks that a command needs; `cli/doctor.py` makes all of them."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

from invrl.errors import ConfigError, InvrlError
from invrl.host.environment_keys import ENVIRONMENT_KEY, held_key
from invrl.rollout.config import RolloutConfig
from invrl.rollout.tasks import load_eval_sets
from invrl.run.config import Config

USER_CODE = ("rollout function", "reward function", "held-out sets", "tasks", "algorithm functions")
"""Everything given by import path, and the tasks: imported, called as far as checks go."""
_TRAINS = ("trainable model", *USER_CODE, "trackers", "saved batches")
_EVALUATES = ("rollout function", "reward function")
_TRAINS_ALONE = ("model folder", "trainable model", "trackers", "saved batches", "megatron options")


def check_run(config: Config, *, trains: bool = False, evaluates: bool = False) -> None:
    """Raises ConfigError for the first thing that a run with these settings could not start with. Packages
    come first: the other checks may need one that is missing."""
    from invrl.cli.machine_checks import check_packages, look

    check_packages(config, look())
    left_out = set[str]() if trains else {*_TRAINS} - {*(_EVALUATES if evaluates else ())}
    for name, check in run_checks(config).items():
        if name not in left_out:
            check()
    if trains:
        check_world(config, cpus=len(os.sched_getaffinity(0)))
    if evaluates:
        load_eval_sets(config.rollout, config.run.seed)


def run_checks(config: Config) -> dict[str, Callable[[], object]]:
    """By name: each raises ConfigError (PluginError), or returns what it saw. Without what
    `--debug-train-only` does not need."""
    from invrl import plugins
    from invrl.algorithms.advantages import advantage_function
    from invrl.algorithms.surrogates import surrogate_function
    from invrl.buffer.group_filters import group_filter_function
    from invrl.engines import sglang_args
    from invrl.observe import tracker_checks
    from invrl.rollout import tasks
    from invrl.train.hf_config import read_hf_config

    rollout, reward = config.rollout, config.rollout.reward_function_path
    checks: dict[str, Callable[[], object]] = {
        "model folder": lambda: check_model(config),
        "chat template": lambda: check_template(config),
        "trainable model": lambda: read_hf_config(model_path(config)).model_type,
        "rollout function": lambda: check_rollout_function(rollout),
        "reward function": lambda: plugins.load_reward_function(reward) if reward else "none",
        "held-out sets": lambda: check_eval_sets(config),
        "tasks": lambda: tasks.check_tasks(rollout, config.run.seed),
        "algorithm functions": lambda: (
            advantage_function(config.algorithm.advantage),
            surrogate_function(config.algorithm.policy_loss),
            group_filter_function(config.buffer.group_filter),
        ),
        "trackers": lambda: tracker_checks.check_trackers(config.run),
        "saved batches": lambda: check_saved(config),
        "sglang options": lambda: sglang_args.sglang_flags(config.sglang),
        "router options": lambda: sglang_args.router_flags(config.router),
        "megatron options": lambda: check_megatron_options(config),
        "gateway port": lambda: check_port(config),
        "environment key": check_environment_key,
    }
    return {name: checks[name] for name in _TRAINS_ALONE} if config.run.debug_train_only else checks


def check_model(config: Config) -> Path:
    """The folder is a model's, and if a checkpoint holds it, its files are what was written."""
    from invrl.model_folder import check_model_folder
    from invrl.run.checkpoints import check_served
    from invrl.train.families.registry import FAMILIES

    path = model_path(config)
    check_model_folder(path, families=FAMILIES)
    check_served(path)
    return path


def check_rollout_function(rollout: RolloutConfig) -> object:
    """The rollout function, callable as one, or a sentence where the run needs none."""
    from invrl import plugins

    if rollout.rollout_function_path:
        return plugins.load_rollout_function(rollout.rollout_function_path)
    if not rollout.runs_rollouts:
        return "none: your environments lease the tasks"
    reason = "no rollout function was given, so nothing would be trained"
    fix = (
        "give --rollout-function-path my_agent:rollout, your async (task, endpoint) -> reward "
        "(rollout_fns/your_task has one to copy), or a preset that names one (--config quickstart)"
    )
    if rollout.external_environments:
        reason = f"held-out tasks are run here, by a rollout function (eval_tasks is {rollout.eval_tasks})"
        fix = "give --rollout-function-path my_agent:rollout, or --eval-tasks 0"
    raise ConfigError("rollout.rollout_function_path", "", reason, fix)


def check_eval_sets(config: Config) -> None:
    """The named held-out sets of a training run."""
    if (sets := config.rollout.eval_sets) and not config.rollout.eval_tasks:
        fix = "set --eval-tasks, or leave --eval-sets out"
        raise ConfigError("rollout.eval_sets", sets, "no evaluation is asked for (eval_tasks is 0)", fix)
    if sets:
        load_eval_sets(config.rollout, config.run.seed)


def check_saved(config: Config) -> None:
    """The batches and the checkpoint that `--debug-train-only` begins with."""
    from invrl.run.checkpoints import first_checkpoint
    from invrl.store.batch_file import saved_steps

    if config.run.debug_train_only:
        begin = first_checkpoint(config.run.load_checkpoint)
        folder = Path(config.run.load_rollout_data).expanduser().absolute()
        saved_steps(folder, after_step=begin.step if begin else 0)


def check_template(config: Config) -> None:
    """As the gateway renders: a first request, and one that follows a reply."""
    from invrl.gateway.rendering.loading import load_renderer
    from invrl.gateway.rendering.parsers import choose_parsers
    from invrl.gateway.types import Message, Prompt

    path, gateway = model_path(config), config.gateway
    chat = tuple(Message(role=role, content="a word") for role in ("user", "assistant", "user"))
    try:
        renderer = load_renderer(str(path), 2**31, chat_template=gateway.chat_template_path)
        ids = renderer.render_first(Prompt(messages=chat[:1])) and renderer.render_first(
            Prompt(messages=chat)
        )
        named = [gateway.tool_call_parser, gateway.reasoning_parser]  # SGLang's import is slow: only for them
        choose_parsers(*("none" if name == "auto" else name for name in named), template="").preload()
    except ConfigError:
        raise
    except ImportError as error:  # transformers looks for jinja2 when it renders
        from invrl.cli.machine_checks import packages_missing

        raise packages_missing(error) from error
    except Exception as error:  # templates raise what they like, the tokenizer bare Exceptions
        reason = str(error) if isinstance(error, InvrlError) else f"no conversation renders: {error!r}"
        if gateway.chat_template_path:
            fix = "repair it, or leave --chat-template-path out"
            raise ConfigError(
                "gateway.chat_template_path", gateway.chat_template_path, reason, fix
            ) from error
        fix = "repair chat_template.jinja (or chat_template in tokenizer_config.json)"
        raise ConfigError("model.model_path", str(path), reason, fix) from error
    if not ids:
        reason = "the chat template renders a conversation to nothing"
        fix = "choose an instruct model, or write another chat_template.jinja"
        raise ConfigError("model.model_path", str(path), reason, fix)


def model_path(config: Config) -> Path:
    """The model's folder. Raises ConfigError if none is given, or if there is none."""
    from invrl.model_folder import no_such_folder

    if not config.model.model_path:
        fix = "give --model-path FOLDER; `invrl prepare-model --help` shows how to make one"
        raise ConfigError("model.model_path", "", "no model was given", fix)
    if not config.model.folder.is_dir():
        raise no_such_folder("model.model_path", config.model.model_path)
    return config.model.folder


def check_world(config: Config, *, cpus: int) -> None:
    """A rank computes on a GPU, or a CPU, of its own; those of a cluster elsewhere are not known here."""
    from invrl.engines.engine_server import count_gpus

    ranks, gpus = config.train.data_parallel_size, count_gpus()
    have, what = (gpus, "GPUs") if gpus else (cpus, "CPUs")
    if ranks > have and not os.environ.get("RAY_ADDRESS"):
        reason = f"this machine has {have} {what}, and every rank needs one of its own"
        fix = f"lower --data-parallel-size to {have} or less"
        raise ConfigError("train.data_parallel_size", ranks, reason, fix)


def check_environment_key() -> None:
    """The one that the user brings, if any."""
    key = held_key(ENVIRONMENT_KEY)
    if key is not None and len(key) < 16:
        reason = "whoever has it opens sessions: it is too short"
        fix = "make it of 16 random characters or more, or unset it"
        raise ConfigError(ENVIRONMENT_KEY, "(not shown)", reason, fix)


def check_port(config: Config) -> None:
    """Nobody listens where the gateway will."""
    host, port = config.gateway.gateway_host, config.gateway.gateway_port
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = f"the gateway cannot listen on {host}:{port} ({error.strerror})"
        if isinstance(error, PermissionError) or "in use" in str(error):
            fix = "choose another --gateway-port, or 0 for a free one"
            raise ConfigError("gateway.gateway_port", port, reason, fix) from error
        fix = "give an address of this machine as --gateway-host (127.0.0.1, or 0.0.0.0 for all)"
        raise ConfigError("gateway.gateway_host", host, reason, fix) from error


def check_megatron_options(config: Config) -> None:
    if config.megatron:
        from invrl.train import megatron_args
        from invrl.train.hf_config import read_hf_config

        path = config.model.model_path
        layers = read_hf_config(model_path(config)).num_hidden_layers if path else 1024
        megatron_args.check_megatron_options(config.megatron, num_layers=layers)
