"""What a user passes through to SGLang (`--sglang-*`) and to the router (`--router-*`).

Invariant: what passes has been parsed by the installed package's own parser, as the process will parse it,
and no option is dropped without a word; what invrl owns, or what would break it, is refused with what to do
instead; all before a process starts. Importable without sglang or torch. Used by `fleet`, `run_checks`."""

import argparse
import difflib
import functools
from collections.abc import Callable, Mapping
from typing import NoReturn

from invrl.errors import ConfigError

_KEYS = "leave it out: random keys are made"
_LOOPBACK = "leave it out: it listens on loopback, without TLS"
_OWN_WEIGHTS = "leave it out: the engine must hold the trainer's own weights"
_ONE_RANK = "leave it out: not yet, weight updates know engines of one rank on one machine"
_BOTH = "leave it out: every engine both prefills and decodes"
_HTTP = "leave it out: an engine is a process of its own, called over HTTP at its root"

SGLANG_OWNED = {
    **dict.fromkeys(("host", "ssl_"), _LOOPBACK),
    **dict.fromkeys(("api_key", "admin_api_key"), _KEYS),
    "port": "leave it out: a free port is taken",
    "model_path": "use --model-path",
    "dtype": "use --engine-dtype",
    "device": "leave it out: it is found",
    "config": "give its options one by one: a file could set what invrl owns",
    "json_model_override_args": "leave it out: the model folder's config.json decides what is computed",
    "weight_version": "leave it out: it counts updates",
    "custom_weight_loader": "leave it out: weight updates need invrl's",
    "checkpoint_engine_wait_weights_before_ready": "leave it out: weights are sent to ready engines",
    "delete_ckpt_after_loading": "leave it out: it deletes the model folder",
    "incremental_streaming_output": "leave it out: the client needs it on",
    "skip_server_warmup": "leave it out: the engine is warmed by its first token",
    "sleep_on_idle": "leave it out: it is on where a waiting scheduler would spin on a core",
    "max_total_tokens": "use --engine-max-total-tokens",
    "dp_size": "use --num-engines",
    "skip_tokenizer_init": "leave it out: stop strings need the tokenizer",
    **dict.fromkeys(("is_embedding", "encoder_only"), "leave it out: the engine must sample"),
    "enable_deterministic_inference": "use --seeded-sampling: alone it gives every request the same seed",
    "rl_on_policy_target": "leave it out: it gives every request the same seed",
    **dict.fromkeys(("tp_size", "pp_size", "ep_size", "dcp_size", "attn_cp_size"), _ONE_RANK),
    **dict.fromkeys(("moe_dp_size", "nnodes", "node_rank"), _ONE_RANK),
    **dict.fromkeys(("quantization", "quantization_param_path", "rl_quant_profile"), _OWN_WEIGHTS),
    **dict.fromkeys(("modelopt_", "enable_lora", "lora_"), _OWN_WEIGHTS),
    **dict.fromkeys(("fastapi_root_path", "use_ray", "grpc_mode", "smg_grpc_mode"), _HTTP),
    "disaggregation_": _BOTH,
}
"""Field, or the prefix of fields that ends in "_" -> what to use instead."""

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


_Option = tuple[argparse.Action, str]
"""Of the installed package, in one of its spellings."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser(add_options: Callable[[argparse.ArgumentParser], None]) -> _Parser:
    """Options are parsed one at a time, without those that invrl gives."""
    parser = _Parser(allow_abbrev=False)
    add_options(parser)
    for action in parser._actions:
        action.required = False
    return parser


def sglang_flags(given: Mapping[str, object]) -> list[str]:
    """Command-line flags for `given` (names as `--sglang-NAME`, kebab or snake). Raises ConfigError."""
    return _flags("sglang", given, sglang_parser, SGLANG_OWNED)


def router_flags(given: Mapping[str, object]) -> list[str]:
    """As `sglang_flags`, for `--router-NAME`."""
    return _flags("router", given, router_parser, ROUTER_OWNED)


def _flags(
    prefix: str, given: Mapping[str, object], load: Callable[[], _Parser], owned: Mapping[str, str]
) -> list[str]:
    if not given:
        return []  # the upstream package is not even imported
    parser = load()
    known = _options(parser)
    flags: list[str] = []
    for raw, value in ((raw, str(value)) for raw, value in given.items()):
        name = raw.replace("-", "_")
        shown = f"--{prefix}-{raw.replace('_', '-')}"

        def refusal(reason: str, fix: str, shown: str = shown, value: str = value) -> ConfigError:
            return ConfigError(shown, value, reason, fix)

        if name not in known:
            raise refusal(f"{prefix} has no such field", _nearest(prefix, name, known))
        action, spelling = known[name]
        prefixes = (fix for one, fix in owned.items() if one.endswith("_") and action.dest.startswith(one))
        if fix := owned.get(action.dest) or next(prefixes, ""):
            raise refusal("invrl sets this itself", fix)
        try:
            parts = _parts(action, spelling, value)
            parser.parse_args(parts)
        except Exception as error:  # the types of some options raise what they like
            reason = str(error).removeprefix(f"argument {'/'.join(action.option_strings)}: ")
            reason = reason.partition(" (choose from")[0].rstrip(".")  # the fix names them
            raise refusal(reason or repr(error), _fix(action, value)) from error
        flags += parts
    return flags


def _nearest(prefix: str, name: str, known: Mapping[str, _Option]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if not near:
        return f"see the {prefix} package's own --help"
    return "did you mean " + " or ".join(f"--{prefix}-{one.replace('_', '-')}" for one in near) + "?"


def _fix(action: argparse.Action, value: str) -> str:
    choices = [str(choice) for choice in action.choices or ()]
    if near := difflib.get_close_matches(value, choices, n=1):
        return f"did you mean {near[0]}?"
    if choices:
        return f"give one of {', '.join(choices)}"
    if action.nargs == 0:
        return "give true or false"
    return f"give {'values' if action.nargs in ('+', '*') else 'a value'} as the package's own --help says"


def _parts(action: argparse.Action, spelling: str, value: str) -> list[str]:
    """The flag and its value as the package's command line has them. Raises ValueError."""
    truth = {"true": True, "1": True, "yes": True, "": True, "false": False, "0": False, "no": False}
    if action.nargs == 0:
        if value.lower() not in truth:
            raise ValueError("this is a switch")
        if truth[value.lower()]:
            return [spelling]
        if not isinstance(action, argparse.BooleanOptionalAction):
            return []  # off already: a switch can only be turned on
        no = spelling.startswith("--no-")
        return [next(one for one in action.option_strings if one.startswith("--no-") != no)]
    if value == "True":  # nothing stood behind the flag
        if action.nargs in ("?", "*"):
            return [spelling]
        raise ValueError("a value is missing")
    if action.nargs in ("+", "*"):  # written with commas or spaces; JSON stays whole
        return [spelling, *([value] if value[:1] in "{[" else value.replace(",", " ").split())]
    return [f"{spelling}={value}"] if value.startswith("-") else [spelling, value]


@functools.cache
def sglang_parser() -> _Parser:
    """The installed package's own parser, of the names, types and lists of its options. ConfigError."""
    try:
        import torch  # noqa: F401

        from invrl import cpu_stand_ins

        cpu_stand_ins.apply()
        from sglang.srt.server_args import ServerArgs
    except ImportError as error:
        reason = f"sglang cannot be imported ({error})"
        raise ConfigError("--sglang-*", "", reason, "run launch/test.sh") from error
    return _parser(ServerArgs.add_cli_args)


@functools.cache
def router_parser() -> _Parser:
    """As `sglang_parser`."""
    try:
        from sglang_router.router_args import RouterArgs
    except ImportError as error:
        reason = f"sglang-router cannot be imported ({error})"
        raise ConfigError("--router-*", "", reason, "pip install sglang-router==0.3.2") from error
    return _parser(functools.partial(RouterArgs.add_cli_args, use_router_prefix=False))


def _options(parser: argparse.ArgumentParser) -> dict[str, _Option]:
    """By snake_case name, aliases too (--tensor-parallel-size is tp_size)."""
    found: dict[str, _Option] = {}
    for spelling, action in parser._option_string_actions.items():
        if spelling.startswith("--") and spelling != "--help":
            found[spelling[2:].replace("-", "_")] = action, spelling
            found.setdefault(action.dest, (action, spelling))
    return found
