"""Checks of the things that a run's settings name, before any process starts: user
code, trackers, saved batches, options of other packages, the gateway's port.

A check takes the configuration, raises ConfigError (or PluginError), and may return
what it found.
"""

import ipaddress
import os
import socket
from pathlib import Path

from invrl.cli.checks.check_warnings import CheckWarning
from invrl.errors import ConfigError
from invrl.host.network.rendezvous import listen
from invrl.host.processes.environment_keys import ENGINE_KEY, ENVIRONMENT_KEY, held_key
from invrl.run.settings.config import Config
from invrl.weights.config import CollectiveWeights, FileWeights

_SHORTEST_KEY = 16


def check_rollout_function(config: Config) -> object:
    """Check that the rollout function can be called as one. Returns a sentence if the
    run needs none."""
    from invrl.user_code import plugins

    rollout = config.rollout
    if rollout.rollout_function_path:
        return plugins.load_rollout_function(rollout.rollout_function_path)
    if not rollout.runs_rollouts:
        return "none: your environments lease the tasks"
    if rollout.external_environments:
        reason = (
            f"held-out tasks (eval.tasks is {rollout.eval.tasks}) are always run by our own workers, which "
            "need a rollout function"
        )
        fix = "give --rollout-function-path my_agent:rollout, or --no-eval.tasks"
    else:
        reason = "no rollout function was given, so nothing would ask the model"
        fix = (
            "give --rollout-function-path my_agent:rollout, your async (task, endpoint) -> reward "
            "(`invrl init FOLDER` writes one to start from), or a preset that names one (--config quickstart)"
        )
    raise ConfigError("rollout.rollout_function_path", "", reason, fix)


def check_environment(config: Config) -> str:
    """Check that the environment is installed and takes its arguments."""
    from invrl.environments.arguments import read_environment_arguments
    from invrl.environments.environment_folder import find_environment
    from invrl.environments.installation import check_installed, virtual_environment

    settings = config.rollout.environment
    if settings is None:
        return "none"
    environment = find_environment("environment.kind", settings.kind)
    check_installed("environment.kind", environment)
    read_environment_arguments("environment.args", environment, settings.args)
    return f"{environment.called}, in {virtual_environment(environment)}"


def check_reward_function(config: Config) -> object:
    from invrl.user_code import plugins

    path = config.rollout.reward_function_path
    if not path:
        return "none"
    return plugins.load_reward_function(path)


def check_gate_policy(config: Config) -> object:
    """Check that the gate's policy is built in, or can be called as one."""
    from invrl.gateway.gate.policies import gate_policy

    gate = config.gateway.gate
    if gate is None:
        return "none"
    return gate_policy(gate.policy)


def check_row_length(config: Config) -> str:
    """Check that a prompt and the longest reply fit a conversation. Reports how long
    that may be, and how the trainer handles a long one."""
    longest = longest_conversation(config)
    longest_reply = config.rollout.max_new_tokens
    if longest_reply >= longest:
        reason = f"a conversation holds {longest} tokens, prompt and answer together"
        fix = "lower --max-new-tokens"
        if longest == config.train.max_sample_tokens:
            fix += ", or raise --max-sample-tokens"
        raise ConfigError("rollout.max_new_tokens", longest_reply, reason, fix)
    text = f"conversations of up to {longest} tokens, answers of up to {longest_reply}"
    budget = config.train.micro_batch_tokens
    if longest > budget:
        text += f"; one of more than {budget} is a micro-batch alone"
    return text


def longest_conversation(config: Config) -> int:
    """Return the most tokens of a conversation in a training run: the engines' limit
    for this model, or a lower one of the settings."""
    from invrl.engines.client.sglang_client import EngineLimits
    from invrl.engines.launch.engine_server import max_total_tokens

    limits = EngineLimits.of(
        config.model.folder, max_total_tokens=max_total_tokens(config.engine)
    )
    return min(
        limits.context_length, config.train.max_sample_tokens or limits.context_length
    )


def check_algorithm(config: Config) -> None:
    """Check that advantage, policy loss, objective and group filter are built in, or
    functions that can be called as such. A user's policy loss or objective is called
    once."""
    from invrl.algorithms.advantages.advantages import advantage_function
    from invrl.algorithms.objectives.objectives import is_built_in, objective_needs
    from invrl.algorithms.policy_loss.axis_plugins import axis_plugins
    from invrl.algorithms.policy_loss.policy_losses import (
        POLICY_LOSSES,
        policy_loss_function,
    )
    from invrl.buffer.groups.group_filters import group_filter_function

    advantage_function(config.algorithm.advantage)
    policy_loss_function(config.algorithm)
    needs = objective_needs(config.algorithm)
    if config.critic_layout is not None and not needs.values:
        reason = f"the objective {config.algorithm.objective} needs no values, so there is no critic"
        fix = "declare Needs(values=True, ...) in it, or leave --critic.data-parallel-size out"
        value = config.critic_layout.data
        raise ConfigError("critic.data_parallel_size", value, reason, fix)
    group_filter_function(config.buffer.group_filter)
    if config.algorithm.policy_loss not in POLICY_LOSSES:
        from invrl.algorithms.objectives.example import try_policy_loss

        try_policy_loss(config.algorithm)
    if any(axis_plugins(config.algorithm)):
        from invrl.algorithms.objectives.example import try_axes

        try_axes(config.algorithm)
    if not is_built_in(config.algorithm.objective):
        from invrl.algorithms.objectives.example import try_objective

        try_objective(config.algorithm)


def check_off_policy(config: Config) -> None:
    """Check that a batch sampled by older weights is trained with a correction."""
    from invrl.algorithms.objectives.objectives import is_built_in, objective_needs

    algorithm = config.algorithm
    staleness = config.buffer.max_staleness
    if not is_built_in(algorithm.objective) or config.run.debug_rollout_only:
        return
    corrected = algorithm.correction != "none" or algorithm.rejection is not None
    anchored = algorithm.old_logprobs == "engine" or algorithm.policy_loss == "vespo"
    if staleness and not corrected and not anchored:
        reason = (
            f"tokens may be {staleness} versions old (max_staleness), and nothing accounts for it: the "
            "gradient is that of a policy which did not sample them"
        )
        fix = "set --correction truncated (or --rejection), --old-logprobs engine, or --max-staleness 0"
        raise CheckWarning("algorithm.correction", algorithm.correction, reason, fix)
    if not staleness and objective_needs(algorithm).staleness:
        reason = (
            "with max_staleness 0 no token is old, and it reads how old each one is"
        )
        fix = "set --max-staleness to 1 or more, or --old-logprobs recompute"
        raise CheckWarning(
            "algorithm.old_logprobs", algorithm.old_logprobs, reason, fix
        )


def check_lost_rollouts(config: Config) -> None:
    """Find a rule that trains mainly on short rollouts."""
    if config.buffer.when_stale == "drop" and config.buffer.max_staleness:
        reason = (
            "a group is dropped if one of its rollouts takes long, so the policy is trained on shorter replies "
            "than its tasks have (by a quarter in a simulation with lognormal lengths)"
        )
        fix = "leave it out: train, mask and wait drop none"
        raise CheckWarning("buffer.when_stale", config.buffer.when_stale, reason, fix)


_USUAL = {
    "train.lr": (1e-8, 1e-3),
    "critic.lr": (1e-8, 1e-2),
    "train.weight_decay": (0.0, 1.0),
    "rollout.temperature": (0.3, 2.0),
    "kl.coefficient": (0.0, 2.0),
    "entropy.coefficient": (0.0, 0.1),
}
"""Lowest and highest usual values in the training of language models, with a margin on
both sides."""


def check_magnitudes(config: Config) -> None:
    """Find numbers that are allowed but probably not intended: `--lr 3` for 3e-6."""
    unusual: dict[str, float] = {}
    texts: list[str] = []
    tables = config.settings()
    for name, (least, most) in _USUAL.items():
        table, key = name.split(".")
        value = tables.get(table, {}).get(key)
        if isinstance(value, float) and not least <= value <= most:
            unusual[name] = value
            texts.append(f"{key} = {value:g}, usually {least:g} to {most:g}")
    for name, value in unusual.items():
        reason = f"far from what language models are trained with, and rarely learns: {'; '.join(texts)}"
        raise CheckWarning(name, value, reason, "check the exponent")


def check_saved_batches(config: Config) -> None:
    """Check the batches and the checkpoint that `--debug-train-only` begins with."""
    from invrl.run.checkpoints.checkpoint import first_checkpoint
    from invrl.store.batch_file import saved_steps

    if not config.run.debug_train_only:
        return
    checkpoint = first_checkpoint(config.run.load_checkpoint)
    first_step = checkpoint.step if checkpoint else 0
    folder = Path(config.run.load_rollout_data or "").expanduser().absolute()
    saved_steps(folder, after_step=first_step)


def check_sglang_options(config: Config) -> None:
    from invrl.engines.launch.sglang_args import sglang_flags

    sglang_flags(config.sglang)


def check_router(config: Config) -> str:
    """Check that smg is installed, if it is wanted. sglang-router is one of the
    packages that every run needs."""
    from invrl.engines.router.smg import find_smg

    if config.engine.router != "smg":
        return config.engine.router
    smg = find_smg(config.engine.smg_environment)
    return f"smg {smg.version} ({smg.python})"


def check_router_options(config: Config) -> None:
    from invrl.engines.launch.sglang_args import router_flags
    from invrl.engines.router.smg import find_smg

    installed_smg = None
    if config.engine.router == "smg":
        installed_smg = find_smg(config.engine.smg_environment)
    router_flags(config.router, installed_smg)


def check_megatron_options(config: Config) -> None:
    from invrl.families.hf_config import read_hf_config
    from invrl.train.runtime import megatron_args

    if not config.megatron:
        return
    if not config.model.model_path:
        megatron_args.check_megatron_options(config.megatron)
        return
    layers = read_hf_config(config.model.folder).num_hidden_layers
    megatron_args.check_megatron_options(
        config.megatron,
        num_layers=layers,
        chunk_sizes=config.train.layout.chunk_sizes(layers),
    )


def check_weight_folder(config: Config) -> str:
    weights = config.weights
    folder = weights.folder if isinstance(weights, FileWeights) else None
    if not folder:
        return "none: the run folder, if weights go by disk"
    if not os.access(folder, os.W_OK | os.X_OK):
        fix = "make it, on a disk that all engines share, or leave --weights.folder out"
        raise ConfigError(
            "weights.folder", folder, "not a folder that can be written", fix
        )
    return folder


def check_weight_host(config: Config) -> str:
    """Check that the trainer can listen at the address from which engines fetch the
    weights."""
    weights = config.weights
    host = None
    if isinstance(weights, FileWeights | CollectiveWeights):
        host = weights.host
    if not host:
        return "none: engines open the weights"
    fix = "give an address of this machine that the engines reach"
    try:
        with listen(host) as listener:
            address = listener.getsockname()[0]
    except OSError as error:
        raise ConfigError("weights.host", host, str(error), fix) from error
    if ipaddress.ip_address(address).is_unspecified:
        reason = "it means every address of this machine, and engines far away would ask their own"
        raise ConfigError("weights.host", host, reason, fix)
    return host


def check_gateway_port(config: Config) -> None:
    """Check that the gateway can listen on its address, and no other program uses
    it."""
    _check_listening(
        "gateway",
        "the gateway",
        config.gateway.host,
        config.gateway.port or 0,
    )


def check_metrics_port(config: Config) -> str:
    """Check that the run can serve its metrics at their address, if they have a port,
    and no other program uses it."""
    host = config.run.metrics.host
    port = config.run.metrics.port
    if not port:
        return "none"
    if port == config.gateway.port:
        fix = "choose another --metrics.port"
        raise ConfigError("metrics.port", port, "it is the gateway's port", fix)
    _check_listening("metrics", "the metrics", host, port)
    return f"{host}:{port}"


def _check_listening(name: str, server: str, host: str, port: int) -> None:
    """Somebody can listen at the address of the settings NAME.host and NAME.port."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = f"{server} cannot listen on {host}:{port} ({error.strerror})"
        if isinstance(error, PermissionError) or "in use" in str(error):
            zero = "a free one" if name == "gateway" else "none"
            fix = f"choose another --{name}.port, or leave it out: {zero}"
            raise ConfigError(f"{name}.port", port, reason, fix) from error
        fix = f"give an address of this machine as --{name}.host (127.0.0.1, or 0.0.0.0 for all)"
        raise ConfigError(f"{name}.host", host, reason, fix) from error


def check_environment_key(config: Config) -> None:
    """Check that the user's environment key, if any, cannot be guessed."""
    key = held_key(ENVIRONMENT_KEY)
    if key is not None and len(key) < _SHORTEST_KEY:
        reason = "too short: anyone who guesses it can open sessions"
        fix = f"use {_SHORTEST_KEY} or more random characters, or unset it"
        raise ConfigError(ENVIRONMENT_KEY, "(not shown)", reason, fix)


def check_engine_key(config: Config) -> str:
    """Check that there is a key for external engines, if there are any. They are
    contacted when the run starts."""
    if not config.engine.external_engines:
        return "none"
    if not held_key(ENGINE_KEY):
        fix = f"set {ENGINE_KEY} in the environment to the key that `invrl engine` had"
        raise ConfigError(
            ENGINE_KEY, "", "it is missing, and there are external_engines", fix
        )
    return ", ".join(config.engine.external_engines)
