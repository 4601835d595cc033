"""Adapters of `invrl serve --adapter`: which are served, and how others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import make_adapter
from family_models import make_family_model

from invrl.cli.checks.model_checks import check_adapters
from invrl.cli.command_settings import settings_for_command
from invrl.cli.flags import parse_flags
from invrl.engines.launch.served_adapter import ServedAdapter
from invrl.errors import ConfigError
from invrl.run.settings.config import Config, resolve
from invrl.run.settings.served_adapters import adapters_by_name
from invrl.train.adapters.base_checksum import weights_checksum

QKV = ("q_proj", "k_proj", "v_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_model(tmp_path_factory.mktemp("model"), "llama")


def configured(command: str, *flags: str) -> Config:
    sources = parse_flags(flags, command=command)
    return resolve(*sources, settings_for_command(command).source())


def serving(model: Path, *adapters: str, command: str = "serve") -> Config:
    flags = ["--model-path", str(model)]
    for adapter in adapters:
        flags += ["--adapter", adapter]
    return configured(command, *flags)


def served(model: Path, *adapters: str) -> ServedAdapter:
    found = adapters_by_name(serving(model, *adapters))
    assert found is not None
    return found


def test_adapters_of_several_ranks_and_targets_are_served_together(
    tmp_path: Path, model: Path
) -> None:
    """Also one with PEFT's own choice of targets, q and v."""
    large = make_adapter(tmp_path / "a b", model, rank=8)
    small = make_adapter(tmp_path / "small", model, targets=("q_proj", "v_proj"))
    found = served(model, f"large={large}", f"v1/small.q-v={small}")
    assert found.rank == 8
    assert found.num_versions == 3
    assert set(found.targets) >= {*QKV, "up_proj", "down_proj", "o_proj"}
    assert found.folders == {"large": large, "v1/small.q-v": small}
    flags = found.flags(on_cpu=True)
    place = flags.index("--lora-paths")
    paths = [json.loads(flag) for flag in flags[place + 1 : place + 3]]
    assert [path["lora_name"] for path in paths] == ["large", "v1/small.q-v"]
    assert paths[0]["lora_path"] == str(large)
    assert check_adapters(serving(model)) == "none"


def another_base(folder: Path) -> None:
    base = {"path": "elsewhere", "checksum": "0" * 32}
    (folder / "adapter_base.json").write_text(json.dumps(base))


def change_config(**fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def change_tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], Any]:
    def rewrite(folder: Path) -> None:
        from safetensors.numpy import load_file, save_file

        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return rewrite


PREFIX = "base_model.model.model.layers"
UNKNOWN = f"{PREFIX}.0.self_attn.c_attn.lora_A.weight"
DOWN = f"{PREFIX}.1.mlp.down_proj.lora_A.weight"


def truncate(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (another_base, "another model"),
        (lambda folder: (folder / "adapter_base.json").write_text("{"), "is damaged"),
        (change_config(use_dora=True), "use_dora"),
        (change_config(r=5), "rank 5"),
        (change_config(target_modules="all-linear"), "target_modules"),
        (change_config(target_modules=list(QKV)), "target_modules"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "it has no"),
        (truncate, "adapter_model.safetensors"),
        (change_tensors(lambda t: t.update({UNKNOWN: t[DOWN]})), "It has q_proj, k"),
        (change_tensors(lambda t: t.pop(DOWN)), "is missing"),
        (change_tensors(lambda t: t.update({DOWN: t[DOWN][:, :3].copy()})), "it is ("),
    ],
    ids=range(12),
)
def test_an_adapter_that_does_not_fit_the_model_is_refused(
    tmp_path: Path, model: Path, damage: Callable[[Path], Any], says: str
) -> None:
    folder = make_adapter(tmp_path / "adapter", model)
    served(model, f"a={folder}")
    damage(folder)
    with pytest.raises(ConfigError) as refused:
        check_adapters(serving(model, f"a={folder}"))
    assert refused.value.field == "model.adapter"
    assert f"a={folder}" in str(refused.value)
    assert says in refused.value.reason


def test_an_adapter_of_this_base_is_served(tmp_path: Path, model: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", model)
    base = {"path": "elsewhere", "checksum": weights_checksum(model)}
    (folder / "adapter_base.json").write_text(json.dumps(base))
    assert served(model, f"a={folder}").rank == 4


@pytest.mark.parametrize(
    ("targets", "missing"),
    [(("q_proj",), "v_proj"), (("v_proj", "k_proj"), "q_proj"), (("up_proj",), "gate")],
)
def test_a_part_of_a_stack_that_engines_do_not_complete_is_refused(
    tmp_path: Path, model: Path, targets: tuple[str, ...], missing: str
) -> None:
    folder = make_adapter(tmp_path / "adapter", model, targets=targets)
    with pytest.raises(ConfigError, match=f"together with {missing}"):
        served(model, f"a={folder}")


def test_adapters_of_experts_are_refused(tmp_path: Path) -> None:
    model = make_family_model(tmp_path / "model", "qwen3_moe")
    folder = make_adapter(tmp_path / "adapter", model)
    with pytest.raises(ConfigError, match="single experts"):
        served(model, f"a={folder}")
    attention = make_adapter(tmp_path / "attention", model, targets=QKV)
    assert served(model, f"a={attention}").targets == tuple(sorted(QKV))


@pytest.mark.parametrize(
    "entries",
    [("folder",), ("=folder",), ("a=",), ("a b=f",), ("a=f", "a=g"), ("version-1=f",)],
    ids=",".join,
)
def test_a_name_that_is_none_or_is_taken_is_refused(
    model: Path, entries: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_adapters(serving(model, *entries))
    assert refused.value.field == "model.adapter"
    assert entries[-1] in str(refused.value) or "version-1" in str(refused.value)


def test_the_models_own_name_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="choose another name"):
        check_adapters(serving(model, f"{model.name}=folder"))


@pytest.mark.parametrize("command", ["train", "eval"])
def test_other_commands_serve_no_adapters_by_name(model: Path, command: str) -> None:
    with pytest.raises(ConfigError, match=r"--adapter|model\.adapter"):
        serving(model, "a=folder", command=command)


@pytest.mark.parametrize(
    "flags", [("--engine.tp-size", "2"), ("--external-engines", "http://e")]
)
def test_engines_that_cannot_load_adapters_are_refused(
    model: Path, flags: tuple[str, ...]
) -> None:
    arguments = ["--model-path", str(model), "--adapter", "a=folder", *flags]
    with pytest.raises(ConfigError, match="adapters"):
        configured("serve", *arguments)
