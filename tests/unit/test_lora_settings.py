"""The settings of an adapter: what they mean, and what they are refused with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from adapter_folders import make_adapter, projection_shapes
from family_models import CONFIGS, make_family_model

from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError
from invrl.families.hf_config import read_hf_config
from invrl.run.settings.config import Config, resolve
from invrl.run.settings.served_adapters import served_adapter
from invrl.train.adapters.peft_folder import check_start
from invrl.train.config import LoraConfig, TrainConfig
from invrl.train.cost.memory_budget import MemoryBudget


def from_flags(*flags: str) -> Config:
    return resolve(*parse_flags(flags))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_model(tmp_path_factory.mktemp("model"), "llama")


def test_one_flag_trains_an_adapter_with_its_own_learning_rate() -> None:
    assert from_flags().train.lora is None
    train = from_flags("--lora.rank", "16").train
    assert train.lora == LoraConfig(rank=16, alpha=32.0, targets=("all-linear",))
    assert train.lora.scale == 2.0
    assert train.lr == 1e-5
    assert from_flags("--lora.rank", "16", "--lr", "3e-6").train.lr == 3e-6
    assert from_flags("--lora.rank", "16", "--no-lora").train.lr == 1e-6


@pytest.mark.parametrize("family", CONFIGS)
def test_all_linear_names_every_projection_of_a_family(
    tmp_path: Path, family: str
) -> None:
    model = make_family_model(tmp_path / "model", family)
    chosen = LoraConfig().projections(read_hf_config(model))
    assert {projection.name for projection in chosen} == set(projection_shapes(model))
    without_experts = LoraConfig(experts="none").projections(read_hf_config(model))
    assert not any(".experts." in projection.name for projection in without_experts)


def test_targets_are_names_of_projections_in_every_layer(model: Path) -> None:
    config = read_hf_config(model)
    targets = ("q_proj", "down_proj")
    chosen = LoraConfig(targets=targets).projections(config)
    assert [projection.name.removeprefix("model.layers.") for projection in chosen] == [
        "0.self_attn.q_proj",
        "0.mlp.down_proj",
        "1.self_attn.q_proj",
        "1.mlp.down_proj",
    ]


@pytest.mark.parametrize(
    "target",
    ["qkv_proj", "proj", "embed_tokens", "lm_head", "layers.0.self_attn.q_proj"],
)
def test_an_unknown_target_is_refused_with_the_known_ones(
    model: Path, target: str
) -> None:
    train = TrainConfig.model_validate({"lora": {"targets": f"q_proj,{target}"}})
    with pytest.raises(ConfigError) as refused:
        train.check_model(read_hf_config(model))
    assert f"lora.targets = '{target}'" in str(refused.value)
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj" in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (
            ("--kl.coefficient", "0.1", "--reference-model-path", "other"),
            "model.reference_model_path",
        ),
        (("--kl.coefficient", "0.1", "--reference.ema", "0.9"), "reference.ema"),
        (
            ("--kl.coefficient", "0.1", "--reference.reset-steps", "5"),
            "reference.reset_steps",
        ),
        (
            ("--moe-router-bias-update-rate", "0.001"),
            "train.moe_router_bias_update_rate",
        ),
    ],
)
def test_what_would_train_other_weights_is_refused(
    flags: tuple[str, ...], field: str
) -> None:
    from_flags(*flags)
    with pytest.raises(ConfigError) as refused:
        from_flags("--lora.rank", "8", *flags)
    assert refused.value.field == field


# ----------------------------------------------------------------- PEFT folders


def checked(model: Path, **lora: object) -> None:
    settings = LoraConfig.model_validate(lora)
    check_start(settings, settings.projections(read_hf_config(model)))


def test_an_adapter_to_begin_with_must_be_that_of_the_settings(
    tmp_path: Path, model: Path
) -> None:
    folder = make_adapter(tmp_path / "adapter", model, targets=("q_proj", "v_proj"))
    given = {"path": str(folder), "rank": 4, "alpha": 8.0}
    checked(model, **given, targets="q_proj,v_proj")
    with pytest.raises(ConfigError, match=re.escape("--lora.rank 4")):
        checked(model, path=str(folder), targets="q_proj,v_proj")
    with pytest.raises(ConfigError, match=re.escape("--lora.alpha 8")):
        checked(model, path=str(folder), rank=4, targets="q_proj,v_proj")
    with pytest.raises(ConfigError, match=re.escape("--lora.targets q_proj,v_proj")):
        checked(model, **given)


@pytest.mark.parametrize(
    "field",
    [
        {"use_dora": True},
        {"use_rslora": True},
        {"init_lora_weights": "pissa"},
        {"lora_bias": True},
        {"alora_invocation_tokens": [1]},
        {"trainable_token_indices": [1]},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 2}},
        {"peft_type": "IA3"},
    ],
    ids=lambda field: next(iter(field)),
)
def test_an_adapter_of_another_kind_is_refused_by_its_field(
    tmp_path: Path, model: Path, field: dict[str, object]
) -> None:
    folder = make_adapter(tmp_path / "adapter", model)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | field))
    with pytest.raises(ConfigError, match=next(iter(field))):
        checked(model, path=str(folder), rank=4, alpha=8.0)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("adapter_config.json")):
        checked(model, path=str(tmp_path))


# ----------------------------------------------------------------- memory


def test_an_adapter_needs_gradients_and_states_of_its_factors_alone(
    model: Path,
) -> None:
    def budget(**train: object) -> MemoryBudget:
        return MemoryBudget.of(
            TrainConfig.model_validate({"train_dtype": "bfloat16"} | train),
            model,
            frozen_models=0,
            served_dtype="bfloat16",
            megatron={},
            copies_checkpoints=False,
            on_cuda=True,
        )

    factors = sum(8 * sum(shape) for shape in projection_shapes(model).values())
    whole = budget()
    adapted = budget(lora={"rank": 8})
    estimate = adapted.largest()
    assert estimate.gradients == 4 * factors
    assert estimate.optimizer == 12 * factors
    assert estimate.weights == whole.largest().weights + 2 * factors
    assert adapted.checkpoint_bytes == 16 * factors


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ((), "weights.transport"),
        (("--lora.rank", "4", "--weights.inflight", "drain"), "weights.inflight"),
        (("--lora.rank", "4", "--engine.tp-size", "2"), "engine.tp_size"),
        (("--lora.rank", "4", "--colocate"), "run.colocate"),
    ],
)
def test_an_adapter_is_not_sent_where_engines_cannot_take_it(
    flags: tuple[str, ...], field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        from_flags("--weights.transport", "adapter", *flags)
    assert refused.value.field == field


def sent(model: Path, **lora: object) -> Config:
    config = from_flags("--weights.transport", "adapter", "--lora.rank", "4")
    changed = config.model_dump()
    changed["model"]["model_path"] = str(model)
    changed["train"]["lora"] |= lora
    changed["buffer"]["max_staleness"] = 2
    return Config.model_validate(changed)


def test_engines_have_room_for_two_versions_more_than_the_staleness(
    model: Path,
) -> None:
    adapter = served_adapter(sent(model))
    assert adapter is not None
    assert (adapter.rank, adapter.num_versions) == (4, 4)
    flags = " ".join(adapter.flags(on_cpu=True))
    assert "--max-loras-per-batch 4" in flags
    assert "gate_proj k_proj o_proj q_proj up_proj v_proj" in flags
    assert served_adapter(from_flags("--lora.rank", "4")) is None


@pytest.mark.parametrize(
    ("family", "lora", "reason"),
    [
        ("llama", {"targets": ["q_proj", "v_proj"]}, "k_proj is not a target"),
        ("llama", {"targets": ["up_proj"]}, "gate_proj is not a target"),
        ("qwen3_moe", {}, "adapters of single experts"),
        ("deepseek_v3", {"experts": "none"}, "SGLang serves no adapter of kv_a_proj"),
        ("glm4_moe", {"experts": "none"}, "beside experts"),
    ],
)
def test_an_adapter_that_sglang_cannot_serve_is_refused(
    tmp_path: Path, family: str, lora: dict[str, object], reason: str
) -> None:
    model = make_family_model(tmp_path / "model", family)
    with pytest.raises(ConfigError, match=reason):
        served_adapter(sent(model, **lora))
