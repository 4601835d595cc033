"""The family files: names and fusions byte for byte, what a config.json may say, and
that every part of invrl knows the same families."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from family_models import CONFIGS, make_family_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tiny_model import Family, tensor_shapes

from invrl import families
from invrl.cli.checks.machine import inspect_machine
from invrl.cli.checks.model_checks import check_engine_here, check_trainable
from invrl.errors import ConfigError
from invrl.families.hf_config import parse_hf_config
from invrl.families.parameter import Fusion, join, split
from invrl.families.registry import FAMILIES
from invrl.run.settings.config import Source, resolve
from invrl.train.config import TrainConfig
from invrl.user_code.model_folder import check_model_folder
from invrl.weights.tensors.engine_parameters import EXPERTS, FUSED

ROOT = Path(__file__).parents[2]
NAMES: tuple[Family, ...] = get_args(Family)


@given(
    groups=st.integers(1, 4),
    queries=st.integers(1, 4),
    head_dim=st.sampled_from([2, 6]),
    columns=st.sampled_from([None, 5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(deadline=None)
def test_fused_qkv_is_interleaved_by_key_value_group_and_splits_back(
    groups: int, queries: int, head_dim: int, columns: int | None, dtype: torch.dtype
) -> None:
    """Row by row against the definition: of each group its queries, its key, its
    value."""
    rest = () if columns is None else (columns,)
    q, k, v = (
        torch.randn(rows * head_dim, *rest).to(dtype)
        for rows in (groups * queries, groups, groups)
    )
    joined = join("qkv", [q, k, v], groups=groups)
    expected = []
    for group in range(groups):
        for head in range(group * queries, (group + 1) * queries):
            expected += list(q[head * head_dim : (head + 1) * head_dim])
        expected += list(k[group * head_dim : (group + 1) * head_dim])
        expected += list(v[group * head_dim : (group + 1) * head_dim])
    assert torch.equal(joined, torch.stack(expected))
    for back, tensor in zip(
        split("qkv", joined, groups=groups, head_dim=head_dim), (q, k, v), strict=True
    ):
        assert torch.equal(back, tensor)
        assert back.is_contiguous()


@pytest.mark.parametrize(
    ("fusion", "count"),
    [
        ("plain", 1),
        ("stack", 2),
    ],
)
def test_other_fused_weights_split_back(fusion: Fusion, count: int) -> None:
    tensors = [torch.randn(6, 4) for _ in range(count)]
    joined = join(fusion, list(tensors), groups=1)
    assert torch.equal(joined, torch.cat(tensors))
    for back, tensor in zip(
        split(fusion, joined, groups=1, head_dim=1), tensors, strict=True
    ):
        assert torch.equal(back, tensor)
        assert back.is_contiguous()


# ---------------------------------------------------------------- one file per family


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_file_lists_each_tensor_that_transformers_saves_once(
    tmp_path: Path, model_type: str, tied: bool
) -> None:
    folder = make_family_model(tmp_path, model_type, tie_word_embeddings=tied)
    config = parse_hf_config(json.loads((folder / "config.json").read_text()))
    listed = [
        name for p in FAMILIES[model_type].parameters(config) for name in p.hugging_face
    ]
    with safe_open(folder / "model.safetensors", framework="np") as tensors:
        assert sorted(listed) == sorted(tensors.keys())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", NAMES)
def test_models_without_a_transformers_class_have_the_tensors_of_their_family_file(
    family: Family, tied: bool
) -> None:
    shapes = tensor_shapes(
        family,
        vocab_size=512,
        layers=2,
        hidden=64,
        intermediate=128,
        q_rows=64,
        kv_rows=32,
        head_dim=16,
        tie_embeddings=tied,
    )
    parsed = parse_hf_config(config(model_type=family, tie_word_embeddings=tied))
    listed = [
        name for p in FAMILIES[family].parameters(parsed) for name in p.hugging_face
    ]
    assert sorted(listed) == sorted(name for name, _ in shapes)


def test_every_part_of_invrl_supports_the_same_families() -> None:
    """The family files are the list. A family that the tests, the documentation,
    transformers or SGLang do not know fails here; the other parts read the list."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    folder = Path(families.__file__).parent
    files = {
        path.stem for path in folder.glob("*.py") if "FAMILY = " in path.read_text()
    }
    assert set(FAMILIES) == files, "a family's file is named by its model_type"
    assert set(FAMILIES) == set(CONFIGS), "tests/family_models.py"
    assert set(NAMES) <= set(FAMILIES)
    rows = re.findall(
        r"^\| `(\w+)` \| (.*) \|$",
        (ROOT / "docs" / "models.md").read_text(),
        re.MULTILINE,
    )
    rows = [row for row in rows if row[0] != "model_type"]
    assert dict(rows) == {name: family.models for name, family in FAMILIES.items()}, (
        "docs/models.md"
    )
    tested_on = (ROOT / "docs" / "tested-on.md").read_text()
    engine_tests = (
        ROOT / "tests" / "integration" / "test_family_engines.py"
    ).read_text()
    for name, family in FAMILIES.items():
        assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] == family.architecture
        assert f"`{name}`" in tested_on, "docs/tested-on.md"
        has_engine_test = f'"{name}"' in engine_tests or name in NAMES
        assert has_engine_test or family.not_served_on_cpu, (
            "tests/integration/test_family_engines.py"
        )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_doctor_names_the_family_and_its_supported_devices(
    tmp_path: Path, model_type: str
) -> None:
    family = FAMILIES[model_type]
    (tmp_path / "config.json").write_text(json.dumps(config(model_type=model_type)))
    run = resolve(Source(name="test", tables={"model": {"model_path": str(tmp_path)}}))
    assert check_trainable(run) == f"{model_type} ({family.models})"
    machine = inspect_machine()
    check_engine_here(run, replace(machine, gpus=1))
    if not family.not_served_on_cpu:
        check_engine_here(run, replace(machine, gpus=0))
        return
    with pytest.raises(ConfigError) as caught:
        check_engine_here(run, replace(machine, gpus=0))
    assert caught.value.reason == family.not_served_on_cpu


@pytest.mark.parametrize("model_type", FAMILIES)
def test_sglang_has_the_class_of_the_family(model_type: str) -> None:
    family = FAMILIES[model_type]
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    source = (
        Path(package.origin).parent / "srt" / "models" / f"{family.sglang_module}.py"
    )
    assert re.search(
        rf"^class {family.architecture}\b", source.read_text(), re.MULTILINE
    )


def test_fused_engine_parameter_means_the_same_in_every_family() -> None:
    for family in FAMILIES.values():
        for fused, parts in family.engine_fusions.items():
            assert FUSED[fused] == parts


def test_expert_parameters_of_engines_mean_the_same_in_every_family() -> None:
    for family in FAMILIES.values():
        for fused, parts in family.engine_experts.items():
            assert EXPERTS[fused] == parts


def test_weights_fused_by_an_engine_are_sent_consecutively() -> None:
    for model_type, family in FAMILIES.items():
        parsed = parse_hf_config(config(model_type=model_type))
        names = [name for p in family.parameters(parsed) for name in p.hugging_face]
        for parts in family.engine_fusions.values():
            for place, name in enumerate(names):
                if f".{parts[0]}." in name:
                    expected = [name.replace(parts[0], part) for part in parts]
                    assert names[place : place + len(parts)] == expected


def test_the_family_files_import_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from invrl.families.hf_config import read_hf_config; "
        "print({'torch', 'transformers', 'megatron'} & set(sys.modules))"
    )
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env=dict(os.environ),
    )
    assert process.stdout.strip() == "set()", process.stderr


# ----------------------------------------------------------------- config.json


def config(**fields: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 512,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    } | fields


def test_fields_missing_from_config_json_have_their_documented_defaults() -> None:
    parsed = parse_hf_config(config())
    assert parsed.num_key_value_heads == 4
    assert parsed.head_dim == 16
    assert parsed.rope.rope_theta == 10000.0
    assert parsed.rope.kind == "default"
    assert parsed.tie_word_embeddings is False


def test_null_in_config_json_means_the_default() -> None:
    parsed = parse_hf_config(
        config(head_dim=None, num_key_value_heads=None, rope_scaling=None)
    )
    assert parsed == parse_hf_config(config())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_parameters": [8.0]}, "rope_parameters"),
        ({"rope_theta": 0}, "rope_parameters"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"full_attention": 1e6}},
            "full_attention",
        ),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_model_that_would_be_computed_wrongly_is_refused_by_field(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hf_config(config(**fields))
    assert caught.value.field == f"config.json: {named}"


@pytest.mark.parametrize(
    ("model_type", "nearest"),
    [
        ("qwen3_5", "qwen3"),
        ("mistral3", "mistral"),
        ("mamba", None),
        (None, None),
    ],
)
def test_an_unsupported_family_is_refused_with_the_list_and_the_nearest(
    tmp_path: Path, model_type: str | None, nearest: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(model_type=model_type)))
    with pytest.raises(ConfigError, match="not supported") as caught:
        check_model_folder(tmp_path, families=FAMILIES)
    assert ", ".join(sorted(FAMILIES)) in caught.value.fix
    assert re.findall(r"the nearest is (\w+)", caught.value.fix) == (
        [nearest] if nearest else []
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 128}, "n_group"),
        ({"n_group": 4, "topk_group": 5}, "topk_group"),
        ({"n_group": 32, "topk_group": 1}, "topk_group"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters"),
    ],
)
def test_glm_that_megatron_would_compute_differently_is_refused(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hf_config(config(model_type="glm4_moe", **fields))
    assert caught.value.field == f"config.json: {named}"


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3", "no experts"),
        ("qwen3_moe", "no bias"),
    ],
)
def test_router_bias_rate_is_refused_for_a_family_without_the_bias(
    family: str, reason: str
) -> None:
    balanced = TrainConfig(moe_router_bias_update_rate=0.001)
    with pytest.raises(ConfigError, match=reason) as caught:
        balanced.check_model(parse_hf_config(config(model_type=family)))
    assert caught.value.field == "train.moe_router_bias_update_rate"
    TrainConfig().check_model(parse_hf_config(config(model_type=family)))
    balanced.check_model(parse_hf_config(config(model_type="glm4_moe")))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
    ],
)
def test_unsupported_deepseek_variant_is_refused(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hf_config(config(model_type="deepseek_v3", **fields))
    assert caught.value.field == f"config.json: {named}"


def test_deepseek_head_size_is_that_of_a_query() -> None:
    """transformers writes the size of its turned part into head_dim."""
    parsed = parse_hf_config(config(model_type="deepseek_v3", head_dim=64))
    assert parsed.head_dim == 192
    assert parsed.rotary_dim == 64


def test_prediction_layers_after_the_last_layer_are_ignored() -> None:
    """GLM's folders have a layer more, which predicts further tokens."""
    parsed = parse_hf_config(config(model_type="glm4_moe", num_hidden_layers=2))
    assert parsed.leaves_out("model.layers.2.eh_proj.weight")
    assert not parsed.leaves_out("model.layers.1.mlp.gate.weight")
    assert not parsed.leaves_out("model.norm.weight")


# ----------------------------------------------------------------- windows


@pytest.mark.parametrize("window", [None, 512])
def test_mistral_window_is_read_from_config_json(window: int | None) -> None:
    parsed = parse_hf_config(config(model_type="mistral", sliding_window=window))
    assert {parsed.attention(layer).window for layer in range(2)} == {window}


def test_mistral_without_a_window_has_the_default_of_transformers() -> None:
    assert parse_hf_config(config(model_type="mistral")).attention(0).window == 4096


# ----------------------------------------------------------------- Gemma 3


GEMMA = {"model_type": "gemma3_text", "sliding_window": 100, "num_hidden_layers": 6}


def test_every_sixth_layer_of_gemma_attends_to_all_tokens() -> None:
    parsed = parse_hf_config(config(**GEMMA))
    assert [parsed.attention(layer).window for layer in range(6)] == [100] * 5 + [None]
    other = parse_hf_config(config(**GEMMA, sliding_window_pattern=3))
    assert [other.attention(layer).window for layer in range(6)] == [100, 100, None] * 2


def test_both_formats_of_config_json_give_gemma_two_ropes() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = parse_hf_config(
        config(
            **GEMMA,
            rope_theta=2e6,
            rope_local_base_freq=2e4,
            rope_scaling=dict(scaling),
        )
    )
    new = parse_hf_config(
        config(
            **GEMMA,
            rope_parameters={
                "full_attention": scaling | {"rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
        )
    )
    for parsed in (old, new):
        sliding = parsed.attention(0).rope
        full = parsed.attention(5).rope
        assert sliding.kind == "default"
        assert sliding.rope_theta == 2e4
        assert full.kind == "linear"
        assert full.rope_theta == 2e6
        assert full.model_dump()["factor"] == 8.0
    plain = parse_hf_config(config(**GEMMA))
    assert plain.attention(0).rope.rope_theta == 1e4
    assert plain.attention(5).rope.rope_theta == 1e6


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters"),
    ],
)
def test_unsupported_gemma_variant_is_refused(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hf_config(config(**GEMMA, **fields))
    assert caught.value.field == f"config.json: {named}"


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
}
"""What SGLang needs."""
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
UNSERVED_DEEPSEEK = [
    ({"topk_method": None}, "topk_method"),
    ({"moe_layer_freq": None}, "moe_layer_freq"),
    ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters"),
    ({"rope_scaling": DEEPSEEK_YARN | {"attention_factor": 2.0}}, "rope_parameters"),
    ({"rope_scaling": DEEPSEEK_YARN | {"truncate": False}}, "rope_parameters"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}},
        "rope_parameters",
    ),
]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "mistral", "sliding_window": 511}, "sliding_window"),
        ({"model_type": "qwen2", "head_dim": 24}, "head_dim"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "mlp_only_layers"),
        *[(DEEPSEEK | fields, named) for fields, named in UNSERVED_DEEPSEEK],
    ],
)
def test_field_that_sglang_computes_differently_is_refused(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match="SGLang") as caught:
        parse_hf_config(config(**fields)).check_served()
    assert caught.value.field == f"config.json: {named}"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_ordinary_model_of_each_family_passes_the_checks(model_type: str) -> None:
    fields = (
        DEEPSEEK | {"rope_scaling": DEEPSEEK_YARN}
        if model_type == "deepseek_v3"
        else {}
    )
    parse_hf_config(config(**{"model_type": model_type, **fields})).check_served()


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_both_field_names_for_the_number_of_experts_are_read(name: str) -> None:
    parsed = parse_hf_config(config(model_type="qwen3_moe", **{name: 12}))
    assert parsed.experts is not None
    assert parsed.experts.count == 12


def test_unused_window_is_ignored() -> None:
    """Qwen2's config.json has a window and a switch that is off."""
    parsed = parse_hf_config(
        config(model_type="qwen2", sliding_window=128, use_sliding_window=False)
    )
    assert parsed.attention(0).window is None
