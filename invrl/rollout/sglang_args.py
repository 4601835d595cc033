"""What a user passes through to SGLang (`--sglang-*`) and to the router (`--router-*`).

Invariant: a name is one of the installed package's own fields, a value has that field's type, and a
field that invrl owns is refused with the setting to use instead; all before a process starts.
Importable without sglang or torch. Used by `fleet` and by the configuration's check.
"""

from __future__ import annotations

import argparse
import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from invrl.errors import ConfigError

SGLANG_OWNED = {
    "host": "leave it out: engines listen on loopback",
    "port": "leave it out: a free port is taken",
    "api_key": "leave it out: random keys are made",
    "admin_api_key": "leave it out: random keys are made",
    "model_path": "use --model-path",
    "dtype": "use --engine-dtype",
    "device": "leave it out: it is found",
    "weight_version": "leave it out: it counts updates",
    "custom_weight_loader": "leave it out: weight updates need invrl's",
    "incremental_streaming_output": "leave it out: the client needs it on",
    "skip_server_warmup": "leave it out: the engine is warmed by its first token",
    "max_total_tokens": "use --engine-max-total-tokens",
    "tp_size": "leave it out: not yet, weight updates know engines of one rank",
    "pp_size": "leave it out: not yet, weight updates know engines of one rank",
    "dp_size": "use --num-engines",
    "skip_tokenizer_init": "leave it out: stop strings need the tokenizer",
    "enable_deterministic_inference": "use --seeded-sampling: alone it gives every request the same seed",
    "rl_on_policy_target": "leave it out: it gives every request the same seed",
    "quantization": "leave it out: the engine must hold the trainer's own weights",
}
"""Field -> what to use instead."""

ROUTER_OWNED = {
    "host": "leave it out: the router listens on loopback",
    "port": "leave it out: a free port is taken",
    "api_key": "leave it out: random keys are made",
    "control_plane_api_keys": "leave it out: random keys are made",
    "worker_urls": "use --num-engines",
    "prometheus_host": "leave it out: it listens on loopback",
    "prometheus_port": "leave it out: a free port is taken",
    "disable_retries": "leave it out: the gateway owns retries",
    "disable_circuit_breaker": "leave it out: 4xx answers would open it for everyone",
    "health_check_endpoint": "leave it out: only /server_info is answered while weights change",
    "disable_health_check": "leave it out: a dead engine must lose its traffic",
    "service_discovery": "use --num-engines",
    "pd_disaggregation": "nothing yet",
    "backend": "leave it out: SGLang",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamField:
    """A field of an upstream record: its command-line flag and the type its values have."""

    name: str
    flag: str
    kind: type
    """bool, int, float, or str for everything else (upstream parses that itself)."""
    is_list: bool = False


def sglang_flags(given: Mapping[str, str]) -> list[str]:
    """Command-line flags for `given` (names as `--sglang-NAME`, kebab or snake). Raises ConfigError."""
    return _flags("sglang", given, _sglang_fields, SGLANG_OWNED)


def router_flags(given: Mapping[str, str]) -> list[str]:
    """As `sglang_flags`, for `--router-NAME`."""
    return _flags("router", given, _router_fields, ROUTER_OWNED)


def _flags(
    prefix: str,
    given: Mapping[str, str],
    fields: Callable[[], Mapping[str, UpstreamField]],
    owned: Mapping[str, str],
) -> list[str]:
    if not given:
        return []  # the upstream package is not even imported
    known = fields()
    flags: list[str] = []
    for raw, value in given.items():
        name = raw.replace("-", "_")
        shown = f"--{prefix}-{raw.replace('_', '-')}"
        if name not in known:
            raise ConfigError(
                field=shown,
                value=value,
                reason=f"{prefix} has no such field",
                fix=_nearest(prefix, name, known),
            )
        if known[name].name in owned:
            raise ConfigError(
                field=shown, value=value, reason="invrl sets this itself", fix=owned[known[name].name]
            )
        flags += _flag(shown, known[name], value)
    return flags


def _nearest(prefix: str, name: str, known: Mapping[str, UpstreamField]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if not near:
        return f"see the {prefix} package's own --help"
    return "did you mean " + " or ".join(f"--{prefix}-{one.replace('_', '-')}" for one in near) + "?"


def _flag(shown: str, field: UpstreamField, value: str) -> list[str]:
    if field.is_list:
        return [field.flag, *value.replace(",", " ").split()]
    if field.kind is bool:
        truth = {"true": True, "1": True, "yes": True, "": True, "false": False, "0": False, "no": False}
        if value.lower() not in truth:
            raise ConfigError(field=shown, value=value, reason="this is a switch", fix="give true or false")
        return [field.flag] if truth[value.lower()] else []
    if field.kind in (int, float):
        try:
            field.kind(value)
        except ValueError:
            raise ConfigError(
                field=shown, value=value, reason=f"not a {field.kind.__name__}", fix="give a number"
            ) from None
    return [field.flag, value]


@functools.cache
def _sglang_fields() -> Mapping[str, UpstreamField]:
    try:
        import torch  # noqa: F401

        from invrl import cpu_stand_ins

        cpu_stand_ins.apply()
        from sglang.srt.server_args import ServerArgs
    except ImportError as error:
        raise ConfigError(
            field="--sglang-*",
            value="",
            reason=f"sglang cannot be imported ({error})",
            fix="run launch/test.sh",
        ) from error

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return _from_parser(parser)


@functools.cache
def _router_fields() -> Mapping[str, UpstreamField]:
    try:
        from sglang_router.router_args import RouterArgs
    except ImportError as error:
        raise ConfigError(
            field="--router-*",
            value="",
            reason=f"sglang-router cannot be imported ({error})",
            fix="pip install sglang-router==0.3.2",
        ) from error

    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    return _from_parser(parser)


def _from_parser(parser: argparse.ArgumentParser) -> Mapping[str, UpstreamField]:
    """The package's own argument parser is its definition of names, types and lists."""
    found: dict[str, UpstreamField] = {}
    for action in parser._actions:
        spellings = [one for one in action.option_strings if one.startswith("--")]
        if not spellings or action.dest == "help":
            continue
        kind = action.type if action.type in (int, float) else str
        field = UpstreamField(
            name=action.dest,
            flag=spellings[0],
            kind=bool if action.nargs == 0 else kind,
            is_list=action.nargs in ("*", "+"),
        )
        # Aliases too (--tensor-parallel-size is tp_size).
        for name in (action.dest, *(one[2:].replace("-", "_") for one in spellings)):
            found.setdefault(name, field)
    return found
