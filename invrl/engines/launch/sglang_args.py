"""Options passed through to SGLang (`--sglang-*`) and to the router (`--router-*`).

Invariant: every accepted option has been parsed by the installed package's own parser,
as the process will parse it, and no option is dropped silently. An option that invrl
sets itself, or that would break it, is refused with the reason and an alternative,
before a process starts. Importable without sglang or torch.

Tokens are sampled from the policy that is trained, and recorded with its log-probs. So
every option of SGLang 0.5.21 that changes what is sampled, or lets the KV cache of one
weight version serve another, is in `SGLANG_OWNED` (invrl sets it) or in
`SGLANG_REFUSED`. A test searches the installed package's options for names that suggest
it, and has a table of those that are harmless.
"""

import argparse
import difflib
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NoReturn, TypeVar

from invrl.engines.inside_sglang.engine_traces import span_flags
from invrl.engines.router import smg
from invrl.errors import ConfigError

_KEYS = "leave it out: random keys are made"
_LOOPBACK = "leave it out: it listens on loopback, without TLS"
_OWN_WEIGHTS = "leave it out: the engine must hold the trainer's own weights"
_ONE_DIVISION = (
    "leave it out: weight updates know engines that --engine.tp-size divides, or none"
)
_BOTH = "leave it out: every engine both prefills and decodes"
_HTTP = "leave it out: an engine is a process of its own, called over HTTP at its root"
_LEAVE_OUT = "leave it out"

_SHARED_GPU = ("--enable-memory-saver", "--mem-fraction-static", "0.8")
"""An engine that starts while the trainer sleeps leaves a fifth of the free memory for
its own activations and CUDA graphs, the trainer's canary, and the trainer's growth
while it trains."""

SGLANG_OWNED = {
    **dict.fromkeys(("host", "ssl_"), _LOOPBACK),
    **dict.fromkeys(("api_key", "admin_api_key"), _KEYS),
    "port": "leave it out: a free port is taken",
    "model_path": "use --model-path",
    "dtype": "use --engine.dtype",
    "device": "leave it out: it is found",
    "config": "give its options one by one: a file could set what invrl owns",
    "json_model_override_args": "leave it out: the model folder's config.json decides what is computed",
    "weight_version": "leave it out: it counts updates",
    "custom_weight_loader": "leave it out: weight updates need invrl's",
    "checkpoint_engine_wait_weights_before_ready": "leave it out: weights are sent to ready engines",
    "delete_ckpt_after_loading": "leave it out: it deletes the model folder",
    "incremental_streaming_output": "leave it out: the client needs it on",
    "skip_server_warmup": "leave it out: the engine is warmed by its first token",
    **dict.fromkeys(
        ("disable_shared_experts_fusion", "enforce_shared_experts_fusion"),
        "leave it out: weight updates need shared experts apart from the others",
    ),
    "sleep_on_idle": "leave it out: it is on where a waiting scheduler would spin on a core",
    "enable_memory_saver": "use --colocate",
    "max_total_tokens": "use --engine.max-total-tokens",
    **dict.fromkeys(
        ("enable_trace", "otlp_traces_endpoint"), "use --log.otel-endpoint"
    ),
    "dp_size": "use --num-engines",
    "skip_tokenizer_init": "leave it out: stop strings need the tokenizer",
    **dict.fromkeys(
        ("is_embedding", "encoder_only"), "leave it out: the engine must sample"
    ),
    "enable_deterministic_inference": "use --engine.seeded-sampling: alone it gives every request the same seed",
    "rl_on_policy_target": "leave it out: it gives every request the same seed",
    "tp_size": "use --engine.tp-size",
    **dict.fromkeys(
        ("base_gpu_id", "gpu_id_step"),
        "leave it out: each engine gets GPUs of its own; CUDA_VISIBLE_DEVICES says among which",
    ),
    **dict.fromkeys(
        ("pp_size", "ep_size", "dcp_size", "attn_cp_size", "moe_dp_size"), _ONE_DIVISION
    ),
    **dict.fromkeys(
        ("nnodes", "node_rank"), "leave it out: an engine is on one machine"
    ),
    **dict.fromkeys(
        ("quantization", "quantization_param_path", "rl_quant_profile"), _OWN_WEIGHTS
    ),
    **dict.fromkeys(("modelopt_", "enable_lora", "lora_"), _OWN_WEIGHTS),
    **dict.fromkeys(
        (
            "max_lora_rank",
            "max_loras_per_batch",
            "max_loaded_loras",
            "max_lora_chunk_size",
            "enable_lora_overlap_loading",
            "experts_shared_outer_loras",
        ),
        "leave it out: the table [lora] and --max-staleness say which adapters engines serve",
    ),
    **dict.fromkeys(
        ("fastapi_root_path", "use_ray", "grpc_mode", "smg_grpc_mode"), _HTTP
    ),
    "disaggregation_": _BOTH,
}
"""Field, or prefix of fields that ends in "_" -> alternative."""

_POLICY = (
    "tokens would be sampled from another distribution than the policy that is trained"
)
_OLD_KV = "it keeps KV that a weight update does not clear: later turns would mix weight versions"
_LISTENS = "it opens a socket that no key protects"
_TWO_MODELS = "weight updates do not reach a draft model, and its acceptance thresholds change what is sampled"

SGLANG_REFUSED = {
    # what is sampled
    "preferred_sampling_params": (
        f"SGLang merges it into every request: {_POLICY}",
        "use --temperature and --max-new-tokens; in `invrl serve` clients set the others",
    ),
    "enable_custom_logit_processor": (
        f"code that comes with a request changes logits: {_POLICY}",
        _LEAVE_OUT,
    ),
    "enable_strict_thinking": (
        f"it bans tokens while the model thinks: {_POLICY}",
        _LEAVE_OUT,
    ),
    "random_seed": (
        "every engine would draw the same numbers, so rollouts of a group on two engines would be equal",
        "use --engine.seeded-sampling, which gives each generation a seed of its own",
    ),
    "allow_auto_truncate": (
        "a prompt that is too long would be cut without a word, and trained as if it were whole",
        "leave it out: the gateway refuses such a prompt",
    ),
    "tokenizer_path": (
        "stop strings would be found with another tokenizer than the model's",
        _LEAVE_OUT,
    ),
    **dict.fromkeys(
        ("speculative_", "uno_lora_path", "enable_multi_layer_eagle"),
        (_TWO_MODELS, _LEAVE_OUT),
    ),
    **dict.fromkeys(
        ("dllm_algorithm", "dllm_algorithm_config"),
        (
            "a diffusion model samples tokens in another order than the trainer takes them in",
            _LEAVE_OUT,
        ),
    ),
    # what is computed
    **dict.fromkeys(
        ("enable_hisparse", "hisparse_config", "forward_hooks"),
        (f"it changes what the model computes: {_POLICY}", _LEAVE_OUT),
    ),
    "weight_cache_": (
        "engines would share the memory of their weights, and an update of one would change another",
        _LEAVE_OUT,
    ),
    # KV and embeddings of older weights
    **dict.fromkeys(
        (
            "hicache_storage_",
            "enable_lmcache",
            "lmcache_config_file",
            "enable_flexkv",
            "flexkv_config_file",
            "radix_cache_backend",
            "enable_unified_cache_external_linker",
            "unified_cache_external_linker_backend",
        ),
        (
            _OLD_KV,
            "leave it out; --sglang-enable-hierarchical-cache keeps KV in host memory and is cleared",
        ),
    ),
    **dict.fromkeys(
        ("enable_mm_global_cache", "mm_global_cache_backend"), (_OLD_KV, _LEAVE_OUT)
    ),
    # who can reach an engine
    **dict.fromkeys(
        (
            "nccl_port",
            "dist_init_addr",
            "gated_launch_port",
            "grpc_port",
            "sidecar",
            "sidecar_args",
            "smg_http_sidecar_port",
            "kv_events_config",
            "load_publish_endpoint",
            "engine_info_bootstrap_port",
            "remote_instance_weight_loader_",
        ),
        (_LISTENS, "leave it out: an engine listens on its HTTP port of loopback only"),
    ),
}
"""Field, or prefix of fields that ends in "_" -> (reason, fix)."""

ROUTER_OWNED = {
    **dict.fromkeys(("host", "prometheus_host", "tls_"), _LOOPBACK),
    **dict.fromkeys(("port", "prometheus_port"), "leave it out: a free port is taken"),
    **dict.fromkeys(("api_key", "control_plane_api_keys"), _KEYS),
    **dict.fromkeys(("worker_urls", "service_discovery"), "use --num-engines"),
    "disable_retries": "leave it out: the gateway owns retries",
    "disable_circuit_breaker": "leave it out: 4xx answers would open it for everyone",
    "health_check_endpoint": "leave it out: only /server_info is answered while weights change",
    "disable_health_check": "leave it out: a dead engine must lose its traffic",
    **dict.fromkeys(("pd_disaggregation", "prefill", "decode"), _BOTH),
    "backend": "leave it out: SGLang",
    "mini_lb": "leave it out: it is for debugging",
}


T = TypeVar("T")
_Option = tuple[argparse.Action, str]
"""An option of the installed package, and the spelling of its flag."""
_TRUE = ("true", "1", "yes", "")
_FALSE = ("false", "0", "no")
_NO_VALUE = "True"
"""Value of a flag that has none on the command line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser(add_options: Callable[[argparse.ArgumentParser], None]) -> _Parser:
    """Return a parser for one option at a time: no option is required."""
    parser = _Parser(allow_abbrev=False)
    add_options(parser)
    for action in parser._actions:
        action.required = False
    return parser


def sglang_flags(options: Mapping[str, object]) -> list[str]:
    """Return the command-line flags for `options` (names as in `--sglang-NAME`, kebab
    or snake). Raises ConfigError."""
    return _flags("sglang", options, sglang_parser, SGLANG_OWNED, SGLANG_REFUSED)


def flags_of_run(
    options: Mapping[str, object],
    *,
    in_place: bool,
    record_experts: bool,
    traces_endpoint: str = "",
    shares_gpu: bool = False,
    by_priority: bool = False,
) -> list[str]:
    """Return `sglang_flags` and the flags that a run's settings need. `in_place`:
    requests continue in place while weights change. `record_experts`: engines keep the
    experts that computed each token. `traces_endpoint`: target of the engines' spans;
    "": none. `shares_gpu`: with the trainer, in turns. `by_priority`: requests with a
    larger priority are sampled first."""
    flags = sglang_flags(options) + span_flags(traces_endpoint)
    if shares_gpu:
        flags = [*_SHARED_GPU, *flags]  # the user's options come later and win
    if record_experts:
        flags.append("--enable-return-routed-experts")
    if in_place:
        # A step that is computed while the previous results are read would still be in
        # flight when the weights change, and its tokens would bear the new version.
        flags.append("--disable-overlap-schedule")
    if by_priority:
        # Preemption would take the KV cache of running requests of younger groups, which
        # then compute everything again.
        flags += ["--enable-priority-scheduling", "--disable-priority-preemption"]
    return flags


def router_flags(
    options: Mapping[str, object], installed_smg: smg.Smg | None = None
) -> list[str]:
    """Return the flags for `--router-NAME`: options of smg, if it is given, else of
    sglang-router. Raises as `sglang_flags` does."""
    if installed_smg is None:
        return _flags("router", options, router_parser, ROUTER_OWNED)
    return _flags(
        "router",
        options,
        lambda: _parser(installed_smg.add_options),
        ROUTER_OWNED | smg.OWNED,
    )


def _flags(
    prefix: str,
    options: Mapping[str, object],
    load_parser: Callable[[], _Parser],
    owned: Mapping[str, str],
    refused: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> list[str]:
    if not options:
        return []  # the upstream package is not even imported
    parser = load_parser()
    known = _options(parser)
    flags: list[str] = []
    for raw_name, raw_value in options.items():
        value = str(raw_value)
        name = raw_name.replace("-", "_")
        shown_name = f"--{prefix}-{raw_name.replace('_', '-')}"
        if name not in known:
            fix = _nearest_names(prefix, name, known)
            raise ConfigError(shown_name, value, f"{prefix} has no such field", fix)
        action, spelling = known[name]
        fix = entry_for(action.dest, owned)
        if fix:
            raise ConfigError(shown_name, value, "invrl sets this itself", fix)
        reason_and_fix = entry_for(action.dest, refused)
        if reason_and_fix:
            reason, fix = reason_and_fix
            raise ConfigError(shown_name, value, reason, fix)
        try:
            arguments = _arguments(action, spelling, value)
            parser.parse_args(arguments)
        except Exception as error:  # some options' types raise any kind of error
            raise ConfigError(
                shown_name, value, _reason(action, error), _fix(action, value)
            ) from error
        flags += arguments
    return flags


def entry_for(field: str, table: Mapping[str, T]) -> T | None:
    """Return a table's entry for a field, by its name or by a prefix that ends in
    "_"."""
    if field in table:
        return table[field]
    for name, entry in table.items():
        if name.endswith("_") and field.startswith(name):
            return entry
    return None


def _nearest_names(prefix: str, name: str, known: Mapping[str, _Option]) -> str:
    names = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if not names:
        return f"see the {prefix} package's own --help"
    flags = [f"--{prefix}-{near.replace('_', '-')}" for near in names]
    return f"did you mean {' or '.join(flags)}?"


def _reason(action: argparse.Action, error: Exception) -> str:
    """Return the parser's message without the flag and the list of choices, which the
    fix names."""
    message = str(error).removeprefix(f"argument {'/'.join(action.option_strings)}: ")
    message = message.partition(" (choose from")[0].rstrip(".")
    return message or repr(error)


def _fix(action: argparse.Action, value: str) -> str:
    choices = [str(choice) for choice in action.choices or ()]
    near = difflib.get_close_matches(value, choices, n=1)
    if near:
        return f"did you mean {near[0]}?"
    if choices:
        return f"give one of {', '.join(choices)}"
    if action.nargs == 0:
        return "give true or false"
    wanted = "values" if action.nargs in ("+", "*") else "a value"
    return f"give {wanted} as the package's own --help says"


def _arguments(action: argparse.Action, spelling: str, value: str) -> list[str]:
    """Return the flag and its value as the package's command line takes them. Raises
    ValueError."""
    if action.nargs == 0:
        return _switch(action, spelling, value)
    takes_many = action.nargs in ("+", "*")
    if value == _NO_VALUE:
        if action.nargs in ("?", "*"):
            return [spelling]
        raise ValueError("a value is missing")
    if takes_many and value[:1] in ("{", "["):  # keep JSON whole
        return [spelling, value]
    if takes_many:  # written with commas or spaces
        return [spelling, *value.replace(",", " ").split()]
    if value.startswith("-"):
        return [f"{spelling}={value}"]
    return [spelling, value]


def _switch(action: argparse.Action, spelling: str, value: str) -> list[str]:
    """Return the arguments for an option without a value. Raises ValueError."""
    if value.lower() in _TRUE:
        return [spelling]
    if value.lower() not in _FALSE:
        raise ValueError("this is a switch")
    if not isinstance(action, argparse.BooleanOptionalAction):
        return []  # already off: a switch can only be turned on
    is_negative = spelling.startswith("--no-")
    for other in action.option_strings:
        if other.startswith("--no-") != is_negative:
            return [other]
    raise ValueError("this switch cannot be turned off")


@functools.cache
def sglang_parser() -> _Parser:
    """Return the installed package's own parser, which knows its options, their types
    and choices. Raises ConfigError."""
    try:
        import torch  # noqa: F401

        from invrl.host import sglang_on_cpu

        sglang_on_cpu.make_importable()
        from sglang.srt.server_args import ServerArgs
    except ImportError as error:
        reason = f"sglang cannot be imported ({error})"
        fix = "`invrl doctor` names the packages that are missing, and the command that installs them"
        raise ConfigError("--sglang-*", "", reason, fix) from error
    return _parser(ServerArgs.add_cli_args)


@functools.cache
def router_parser() -> _Parser:
    """Return the router's parser, as `sglang_parser` does."""
    try:
        from sglang_router.router_args import RouterArgs
    except ImportError as error:
        reason = f"sglang-router cannot be imported ({error})"
        raise ConfigError(
            "--router-*", "", reason, "pip install sglang-router==0.3.2"
        ) from error
    return _parser(functools.partial(RouterArgs.add_cli_args, use_router_prefix=False))


def _options(parser: argparse.ArgumentParser) -> dict[str, _Option]:
    """Return the options by snake_case name, aliases included (--tensor-parallel-size
    is tp_size)."""
    options: dict[str, _Option] = {}
    for spelling, action in parser._option_string_actions.items():
        if spelling.startswith("--") and spelling != "--help":
            options[spelling[2:].replace("-", "_")] = action, spelling
            options.setdefault(action.dest, (action, spelling))
    return options
