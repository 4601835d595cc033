"""What may be passed through upstream, checked against the installed packages."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from invrl.config_checks import _SEEDED_BACKENDS
from invrl.errors import ConfigError
from invrl.rollout import launch_router, sglang_args
from invrl.rollout.sglang_args import ROUTER_OWNED, SGLANG_OWNED, router_flags, sglang_flags


def test_values_become_flags() -> None:
    assert sglang_flags({"max-running-requests": "4", "disable_radix_cache": "true"}) == [
        "--max-running-requests",
        "4",
        "--disable-radix-cache",
    ]
    assert router_flags({"log-level": "info", "max_payload_size": "10"}) == [
        "--log-level", "info", "--max-payload-size", "10"
    ]  # fmt: skip
    assert sglang_flags({"disable_radix_cache": "false"}) == []
    assert router_flags({"request_id_headers": "a b"}) == ["--request-id-headers", "a", "b"]


@pytest.mark.parametrize(
    ("flags", "given", "nearest"),
    [
        (sglang_flags, "attention-backnd", "--sglang-attention-backend"),
        (router_flags, "log-levle", "--router-log-level"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(flags, given: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as raised:
        flags({given: "x"})
    assert nearest in raised.value.fix


@pytest.mark.parametrize("value", ["many", "1.5", ""])
def test_a_value_of_another_type_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="not a int"):
        sglang_flags({"max-running-requests": value})


def test_a_switch_takes_true_or_false() -> None:
    with pytest.raises(ConfigError, match="switch"):
        sglang_flags({"disable-radix-cache": "maybe"})


@pytest.mark.parametrize("name", sorted(SGLANG_OWNED))
def test_what_invrl_owns_in_sglang_is_refused(name: str) -> None:
    """Also proves that the name still exists upstream."""
    with pytest.raises(ConfigError, match="sets this itself"):
        sglang_flags({name: "1"})


@pytest.mark.parametrize("name", sorted(ROUTER_OWNED))
def test_what_invrl_owns_in_the_router_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="sets this itself"):
        router_flags({name: "1"})


def test_a_key_that_begins_with_a_dash_is_a_value() -> None:
    """Random keys do, one in 64."""
    from invrl.rollout import launch_sglang  # not at the top: it changes what this process can import

    parser = argparse.ArgumentParser()
    for option in ("--api-key", "--admin-api-key", "--control-plane-api-keys"):
        parser.add_argument(option)
    engine = launch_sglang.key_flags({"INVRL_ENGINE_API_KEY": "-a", "INVRL_ENGINE_ADMIN_KEY": "--b"})
    router = launch_router.key_flags({"INVRL_ROUTER_API_KEY": "-c", "INVRL_ROUTER_MANAGEMENT_KEY": "-d"})
    keys = vars(parser.parse_args(engine))
    assert (keys["api_key"], keys["admin_api_key"]) == ("-a", "--b")
    assert parser.parse_args(router).api_key == "-c"


def test_seeded_sampling_allows_attention_that_sglang_can_repeat() -> None:
    from sglang.srt.arg_groups.choices import DETERMINISTIC_ATTENTION_BACKEND_CHOICES

    assert {*_SEEDED_BACKENDS["attention_backend"]} - {"torch_native"} <= {
        *DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    }


def test_an_alias_does_not_get_around() -> None:
    with pytest.raises(ConfigError, match="sets this itself"):
        sglang_flags({"tensor-parallel-size": "2"})


def test_imports_without_torch_or_sglang() -> None:
    program = (
        "import sys; import invrl.rollout.sglang_args as a; assert a.sglang_flags({}) == [];"
        "assert not {'torch', 'sglang', 'sglang_router'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_no_sglang_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", None)
    sglang_args._sglang_fields.cache_clear()
    with pytest.raises(ConfigError, match="cannot be imported"):
        sglang_flags({"log-level": "info"})
