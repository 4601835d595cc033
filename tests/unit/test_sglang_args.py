"""What may be passed through upstream, checked against the installed packages."""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Mapping

import msgspec
import pytest

from invrl.engines.client.generation import NEUTRAL_SAMPLING
from invrl.engines.launch import sglang_args
from invrl.engines.launch.sglang_args import (
    ROUTER_OWNED,
    SGLANG_OWNED,
    SGLANG_REFUSED,
    entry_for,
    flags_of_run,
    router_flags,
    router_parser,
    sglang_flags,
    sglang_parser,
)
from invrl.errors import ConfigError
from invrl.run.settings.engine_contradictions import _SEEDED_BACKENDS
from invrl.run.settings.other_trainers import ANSWERS

Flags = Callable[[Mapping[str, str]], list[str]]
OF = {
    sglang_flags: (sglang_parser, SGLANG_OWNED),
    router_flags: (router_parser, ROUTER_OWNED),
}


def test_sglang_values_become_flags() -> None:
    assert sglang_flags(
        {"max-running-requests": "4", "disable_radix_cache": "true"}
    ) == [
        "--max-running-requests",
        "4",
        "--disable-radix-cache",
    ]
    assert router_flags({"log-level": "info", "max_payload_size": "10"}) == [
        "--log-level",
        "info",
        "--max-payload-size",
        "10",
    ]
    assert sglang_flags({"disable_radix_cache": "false"}) == []
    assert router_flags({"request_id_headers": "a b"}) == [
        "--request-id-headers",
        "a",
        "b",
    ]


@pytest.mark.parametrize(
    ("flags", "given", "nearest"),
    [
        (sglang_flags, "attention-backnd", "--sglang-attention-backend"),
        (router_flags, "log-levle", "--router-log-level"),
    ],
)
def test_unknown_sglang_option_suggests_the_nearest(
    flags, given: str, nearest: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        flags({given: "x"})
    assert nearest in raised.value.fix


@pytest.mark.parametrize("value", ["many", "1.5", ""])
def test_sglang_value_of_another_type_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="invalid int value"):
        sglang_flags({"max-running-requests": value})


def test_sglang_switch_takes_true_or_false() -> None:
    with pytest.raises(ConfigError, match="switch"):
        sglang_flags({"disable-radix-cache": "maybe"})


@pytest.mark.parametrize("flags", [sglang_flags, router_flags])
def test_options_set_by_invrl_are_refused(flags: Flags) -> None:
    """Also proves that the names still exist upstream."""
    parser, owned = OF[flags]
    names = {action.dest for action in parser()._actions}
    for name, fix in owned.items():
        meant = (
            {each for each in names if each.startswith(name)}
            if name.endswith("_")
            else {name}
        )
        assert meant, f"{name}: nothing upstream is called so"
        for each in meant:
            with pytest.raises(ConfigError, match="sets this itself") as caught:
                flags({each: "1"})
            assert caught.value.fix == fix


def meant(name: str) -> set[str]:
    """The installed package's fields that a table's name or prefix stands for."""
    names = {action.dest for action in sglang_parser()._actions}
    return {
        field
        for field in names
        if field == name or (name.endswith("_") and field.startswith(name))
    }


@pytest.mark.parametrize("name", SGLANG_REFUSED)
def test_options_that_change_sampling_or_keep_kv_are_refused_with_reason_and_fix(
    name: str,
) -> None:
    """Also proves that the names still exist upstream."""
    assert meant(name), f"{name}: nothing upstream is called so"
    for field in meant(name):
        with pytest.raises(ConfigError) as caught:
            sglang_flags({field: "1"})
        assert (caught.value.reason, caught.value.fix) == SGLANG_REFUSED[name]


_SAMPLES = re.compile(
    r"sampl|logit|penalt|temperature|seed|specul|truncat|think|dllm|diffus|hook|thresh.*accept|watermark"
)
_CACHES = re.compile(r"cache|lmcache|flexkv|hicache|linker|kv_events")
SGLANG_HARMLESS = {
    "sampling_defaults": "where SGLang's OpenAI routes take their defaults from; /generate has none",
    "sampling_backend": "another kernel for the same distribution; seeded sampling has a check of its own",
    "sampling_mask_max_tokens": "bounds an answer that nobody of ours asks for",
    "mlx_enable_sampling": "of a device that we do not run on",
    "disable_radix_cache": "less is cached",
    "enable_hierarchical_cache": "the copy in host memory is cleared with the cache at each update",
    "hicache_": "size and layout of that copy (its storage is refused)",
    "enable_session_radix_cache": "for sessions of SGLang's own, which nobody of ours opens",
    "radix_eviction_": "what is cached for how long within one weight version",
    "enable_cache_report": "a number in answers of the OpenAI routes",
    "prefill_delayer_token_usage_low_watermark": "when a prefill waits for others",
    "strip_thinking_cache": "less is cached",
    "disable_chunked_prefix_cache": "another way to compute the same prefill",
    "mamba_radix_cache_strategy": "what is cached for how long within one weight version",
    "kv_cache_dtype": "precision of compute, like a kernel's: the log-probs are those that were sampled from",
    "prefill_only_disable_kv_cache": "for models that do not sample",
    "mm_preprocess_cache_size_mb": "pixels, before any weight is used",
    "enable_prefix_mm_cache": "for servers that only encode",
    "enable_dsa_cache_layer_split": "where KV lies",
    "linear_replayssm_cache_len": "where a linear layer's state lies",
    "enable_mamba_cache_stochastic_rounding": "precision of compute, like kv_cache_dtype",
    "dsa_paged_mqa_logits_backend": "a kernel of attention",
    "prefill_kv_cache_dequant_dtype": "precision of compute, like kv_cache_dtype",
    "max_mamba_cache_size": "how much is cached within one weight version",
    "mamba_cache_philox_rounds": "precision of compute, like kv_cache_dtype",
    "enable_linker_mla_dedup": "nothing without the linker, which is refused",
    "dllm_fdfo": "nothing without dllm_algorithm, which is refused",
    "weight_loader_drop_cache_after_load": "the file system's cache of the model folder",
    "disable_outlines_disk_cache": "grammars, which depend on no weight",
    "default_chat_template_kwargs": "of SGLang's OpenAI routes; the gateway renders",
}
"""Field or prefix that seems to change sampling, or to keep KV -> reason that it does
not."""


def test_every_sampling_or_caching_option_is_classified() -> None:
    """One that a newer SGLang brings shows here."""
    tables = (SGLANG_OWNED, SGLANG_REFUSED, SGLANG_HARMLESS)
    undecided = [
        action.dest
        for action in sglang_parser()._actions
        if (_SAMPLES.search(action.dest) or _CACHES.search(action.dest))
        and not any(entry_for(action.dest, table) for table in tables)
    ]
    assert undecided == []


@pytest.mark.parametrize("name", SGLANG_HARMLESS)
def test_options_classified_as_harmless_exist_and_pass(name: str) -> None:
    fields = {field for field in meant(name) if not entry_for(field, SGLANG_REFUSED)}
    assert fields, f"{name}: nothing upstream is called so"
    actions = {action.dest: action for action in sglang_parser()._actions}
    for field in fields:
        assert sglang_flags({field: valid_value(actions[field])})


def test_each_request_names_every_sampling_parameter_that_sglang_has() -> None:
    """So that nothing is left for the server to fill in."""
    sglang_parser()
    from sglang.srt.sampling.sampling_params import SamplingParams

    of_the_answer = {
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "no_stop_trim",
        "stream_interval",
    }
    of_each_request = {"temperature", "top_p", "max_new_tokens", "sampling_seed"}
    internal = {
        "stop_strs",
        "stop_regex_strs",
        "stop_str_max_len",
        "stop_regex_max_len",
        "is_normalized",
    }
    internal |= {"ebnf_full_assistant"}
    names = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert names - of_the_answer - of_each_request - internal == set(NEUTRAL_SAMPLING)
    neutral = SamplingParams(**NEUTRAL_SAMPLING)  # type: ignore[arg-type]
    default = SamplingParams()
    for params in (neutral, default):
        params.normalize(None)
    assert msgspec.structs.asdict(neutral) == msgspec.structs.asdict(default)


def valid_value(action: argparse.Action) -> str:
    """Text that the option's own type and choices take."""
    for value in (
        "true",
        *map(str, action.choices or ()),
        "3",
        "0.5",
        "{}",
        "[]",
        "text",
    ):
        if action.nargs == 0 or value != "true":
            with contextlib.suppress(Exception):
                kind = action.type if callable(action.type) else str
                if (
                    action.nargs == 0
                    or not action.choices
                    or kind(value) in action.choices
                ):
                    kind(value)
                    return value
    raise AssertionError(f"no value for {action.option_strings}")


def answer(flags: Flags, name: str, value: str) -> list[str] | ConfigError:
    try:
        return flags({name: value})
    except ConfigError as error:
        return error


@pytest.mark.parametrize("flags", [sglang_flags, router_flags])
def test_every_upstream_option_is_passed_on_or_refused(flags: Flags) -> None:
    """Each spelling of each option: with a valid value the package's own parser reads
    it from the command line, or the refusal says what to do; with any other value there
    is an answer of one of these kinds."""
    parser, owned = OF[flags]
    walked = 0
    accepted = 0
    refused = 0
    for action in parser()._actions:
        for spelling in action.option_strings:
            if not spelling.startswith("--") or spelling == "--help":
                continue
            walked += 1
            name = spelling.removeprefix("--")
            given_options = answer(flags, name, valid_value(action))
            if isinstance(given_options, ConfigError):
                assert given_options.field.endswith(name)
                if given_options.reason == "invrl sets this itself":
                    assert given_options.fix in owned.values()
                else:
                    assert flags is sglang_flags
                    assert (
                        given_options.reason,
                        given_options.fix,
                    ) in SGLANG_REFUSED.values()
                refused += 1
                continue
            read = vars(parser().parse_args(given_options))[action.dest]
            if action.nargs == 0:
                assert read is not spelling.startswith("--no-"), spelling
                off = vars(parser().parse_args(flags({name: "false"})))[action.dest]
                assert bool(off) is spelling.startswith("--no-"), spelling
            else:
                assert given_options[0] == spelling
                assert read != action.default or read in (
                    3,
                    [3],
                    "3",
                    {},
                    *(action.choices or ()),
                ), spelling
            accepted += 1
            for value in ("True", "false", "-1", "--x", "", "a,b", "{", "1e999"):
                other = answer(flags, name, value)
                if isinstance(other, ConfigError):
                    assert other.reason, spelling
                    assert other.fix, spelling
                else:
                    assert other or action.nargs == 0, f"{spelling} {value} is dropped"
    print(f"{walked} options walked: {accepted} accepted, {refused} refused")
    assert walked > 90
    assert accepted > refused > 15


@pytest.mark.parametrize(
    ("name", "value", "reason", "fix"),
    [
        (
            "attention-backend",
            "tritn",
            "invalid choice: 'tritn'",
            "did you mean triton?",
        ),
        ("gc-threshold", "1,x", "invalid int value: 'x'", "values"),
        ("context-length", "True", "a value is missing", "a value"),
        ("mm-process-config", "{", "value: '{'", "a value"),
    ],
)
def test_value_that_upstream_would_refuse_is_refused_before_the_start(
    name: str, value: str, reason: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        sglang_flags({name: value})
    assert reason in caught.value.reason
    assert fix in caught.value.fix


def test_a_negated_switch_keeps_its_meaning() -> None:
    assert (
        sglang_flags({"no-dllm-fdfo": "true"})
        == sglang_flags({"dllm_fdfo": "false"})
        == ["--no-dllm-fdfo"]
    )
    assert sglang_flags({"no-dllm-fdfo": "false"}) == ["--dllm-fdfo"]


def test_seeded_sampling_allows_attention_that_sglang_can_repeat() -> None:
    from sglang.srt.arg_groups.choices import DETERMINISTIC_ATTENTION_BACKEND_CHOICES

    assert {*_SEEDED_BACKENDS["attention_backend"]} - {"torch_native"} <= {
        *DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    }


def test_engine_on_a_shared_gpu_leaves_a_fifth_of_the_memory_by_default() -> None:
    def of_run(
        options: Mapping[str, object], *, shares_gpu: bool
    ) -> argparse.Namespace:
        flags = flags_of_run(
            options, in_place=False, record_experts=False, shares_gpu=shares_gpu
        )
        return sglang_args.sglang_parser().parse_args(flags)

    shared = of_run({}, shares_gpu=True)
    assert shared.enable_memory_saver is True
    assert shared.mem_fraction_static == 0.8
    chosen = of_run({"mem-fraction-static": "0.7"}, shares_gpu=True)
    assert chosen.enable_memory_saver is True
    assert chosen.mem_fraction_static == 0.7
    alone = of_run({}, shares_gpu=False)
    assert alone.enable_memory_saver is False
    assert alone.mem_fraction_static is None
    with pytest.raises(ConfigError, match="use --colocate"):
        sglang_flags({"enable-memory-saver": True})


def test_engine_that_schedules_by_priority_preempts_nothing() -> None:
    def of_run(*, by_priority: bool) -> argparse.Namespace:
        flags = flags_of_run(
            {}, in_place=False, record_experts=False, by_priority=by_priority
        )
        return sglang_args.sglang_parser().parse_args(flags)

    assert of_run(by_priority=False).enable_priority_scheduling is False
    options = of_run(by_priority=True)
    assert options.enable_priority_scheduling is True
    assert options.disable_priority_preemption is True
    # SGLang's defaults, which the priorities rely on.
    assert options.schedule_low_priority_values_first is False
    assert options.schedule_policy == "fcfs"


def test_alias_of_a_refused_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="sets this itself"):
        sglang_flags({"tensor-parallel-size": "2"})


def test_sglang_arguments_import_neither_torch_nor_sglang() -> None:
    program = (
        "import sys; import invrl.engines.launch.sglang_args as a; assert a.sglang_flags({}) == [];"
        "assert not {'torch', 'sglang', 'sglang_router'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_missing_sglang_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", None)
    sglang_args.sglang_parser.cache_clear()
    with pytest.raises(ConfigError, match="cannot be imported"):
        sglang_flags({"log-level": "info"})


def test_options_that_foreign_names_are_answered_with_exist() -> None:
    answers = " ".join(ANSWERS.values())
    options = set(re.findall(r"--sglang-([a-z-]*[a-z])", answers))
    known = {
        flag for action in sglang_parser()._actions for flag in action.option_strings
    }
    assert options
    assert {f"--{option}" for option in options} <= known


def test_every_option_of_adapters_is_refused() -> None:
    """The settings of a run decide what its engines serve."""
    options = [action.dest for action in sglang_parser()._actions]
    allowed = [
        option
        for option in options
        if "lora" in option
        and not entry_for(option, SGLANG_OWNED)
        and not entry_for(option, SGLANG_REFUSED)
    ]
    assert allowed == []
