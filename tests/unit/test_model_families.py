"""The name files: Megatron parameters from Hugging Face tensors and back, byte for byte."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import Family, tensor_shapes

from invrl.engines import sglang_models
from invrl.errors import ConfigError
from invrl.train.families.parameter import Fusion, join, split
from invrl.train.families.registry import FAMILIES
from invrl.train.hf_config import parse_hf_config

NAMES: list[Family] = ["llama", "mistral", "qwen2", "qwen3"]


@given(
    groups=st.integers(1, 4),
    queries=st.integers(1, 4),
    head_dim=st.sampled_from([2, 6]),
    columns=st.sampled_from([None, 5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(deadline=None)
def test_qkv_is_interleaved_by_key_value_group_and_comes_back(
    groups: int, queries: int, head_dim: int, columns: int | None, dtype: torch.dtype
) -> None:
    """Row by row against the definition: of each group its queries, its key, its value."""
    rest = () if columns is None else (columns,)
    q, k, v = (torch.randn(rows * head_dim, *rest).to(dtype) for rows in (groups * queries, groups, groups))
    joined = join("qkv", [q, k, v], groups=groups)
    expected = []
    for group in range(groups):
        for head in range(group * queries, (group + 1) * queries):
            expected += list(q[head * head_dim : (head + 1) * head_dim])
        expected += list(k[group * head_dim : (group + 1) * head_dim])
        expected += list(v[group * head_dim : (group + 1) * head_dim])
    assert torch.equal(joined, torch.stack(expected))
    for back, tensor in zip(split("qkv", joined, groups=groups, head_dim=head_dim), (q, k, v), strict=True):
        assert torch.equal(back, tensor)
        assert back.is_contiguous()


@pytest.mark.parametrize(("fusion", "count"), [("plain", 1), ("stack", 2)])
def test_the_other_fusions_come_back(fusion: Fusion, count: int) -> None:
    tensors = [torch.randn(6, 4) for _ in range(count)]
    joined = join(fusion, list(tensors), groups=1)
    assert torch.equal(joined, torch.cat(tensors))
    for back, tensor in zip(split(fusion, joined, groups=1, head_dim=1), tensors, strict=True):
        assert torch.equal(back, tensor)
        assert back.is_contiguous()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", NAMES)
def test_a_name_file_lists_each_tensor_of_its_family_once(family: Family, tied: bool) -> None:
    shapes = tensor_shapes(
        family,
        vocab_size=512,
        layers=3,
        hidden=8,
        intermediate=16,
        q_rows=8,
        kv_rows=4,
        head_dim=2,
        tie_embeddings=tied,
    )
    listed = [name for p in FAMILIES[family].parameters(layers=3, tied=tied) for name in p.hugging_face]
    assert sorted(listed) == sorted(name for name, _ in shapes)


def config(**fields: object) -> dict[str, object]:
    return {
        "model_type": "llama",
        "vocab_size": 512,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    } | fields


def test_what_config_json_leaves_out_has_its_documented_default() -> None:
    parsed = parse_hf_config(config())  # type: ignore[arg-type]
    assert (parsed.num_key_value_heads, parsed.head_dim, parsed.rope_theta) == (4, 16, 10000.0)
    assert (parsed.rope_factor, parsed.tie_word_embeddings) == (None, False)


def test_rotary_settings_of_both_generations_of_transformers() -> None:
    old, new = config(rope_theta=5e5), config(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert parse_hf_config(old) == parse_hf_config(new)  # type: ignore[arg-type]
    scaled = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert parse_hf_config(config(rope_scaling=scaled)).rope_factor == 32.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 2.0}}, "rope_parameters"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused_by_name(
    fields: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hf_config(config(**fields))  # type: ignore[arg-type]
    assert caught.value.field == f"config.json: {named}"


def mistral(**fields: object) -> dict[str, object]:
    return config(model_type="mistral", **fields)


@pytest.mark.parametrize("window", [None, 512, 4096])
def test_a_window_that_reaches_over_all_positions_limits_nothing(window: int | None) -> None:
    assert parse_hf_config(mistral(sliding_window=window)).model_type == "mistral"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "value"), [({"sliding_window": 511}, 511), ({"max_position_embeddings": 32768}, None)]
)
def test_mistral_s_sliding_window_is_refused(fields: dict[str, object], value: int | None) -> None:
    """A config.json of Mistral's that names no window has one of 4096 in transformers."""
    with pytest.raises(ConfigError, match="sliding_window") as caught:
        parse_hf_config(mistral(**fields))  # type: ignore[arg-type]
    assert caught.value.field == "config.json: sliding_window"
    assert caught.value.value == value
    assert "null" in caught.value.fix


def test_a_window_that_is_not_used_is_none() -> None:
    """Qwen2's config.json has a window and a switch that is off."""
    given = config(model_type="qwen2", sliding_window=128, use_sliding_window=False)
    assert parse_hf_config(given).model_type == "qwen2"  # type: ignore[arg-type]


def test_there_is_one_list_of_families() -> None:
    """Tests, and the classes that SGLang is shown first, have those that the trainer knows."""
    assert sorted(FAMILIES) == sorted(NAMES) == sorted(get_args(Family))
    shown = Path(sglang_models.__path__[0]) / "families.py"
    assert sorted(re.findall(r"from sglang.srt.models.(\w+) import", shown.read_text())) == sorted(FAMILIES)
