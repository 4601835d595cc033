"""Damaged or unusual token files of a model folder: named as what they are, by the
check of doctor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from tiny_model import make_tiny_model

from invrl.errors import ConfigError
from invrl.families.registry import FAMILIES
from invrl.gateway.rendering.loading import load_renderer
from invrl.user_code.model_folder import check_model_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


def check(model: Path) -> None:
    check_model_folder(model, families=FAMILIES)


def change(file: Path, **fields: object) -> None:
    settings = json.loads(file.read_text())
    settings.update(fields)
    file.write_text(
        json.dumps(
            {name: value for name, value in settings.items() if value is not None}
        )
    )


@pytest.mark.parametrize("content", ["{", "[]", "null", "\udcff", "[" * 100_000])
@pytest.mark.parametrize(
    "name",
    ["generation_config.json", "special_tokens_map.json", "tokenizer_config.json"],
)
def test_a_damaged_file_is_named(model: Path, name: str, content: str):
    (model / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=name):
        check(model)
    with pytest.raises(ConfigError, match=name):
        load_renderer(str(model), 512)


@pytest.mark.parametrize("end", ["2", ["2"], 2.5, True, -1, {"id": 2}])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_token_that_is_no_id_is_named(model: Path, name: str, end: object):
    change(model / name, eos_token_id=end)
    with pytest.raises(ConfigError, match=f"eos_token_id in {name}"):
        check(model)
    with pytest.raises(ConfigError, match=f"eos_token_id in {name}"):
        load_renderer(str(model), 512)


@pytest.mark.parametrize(
    "template",
    [["x"], [None], [{"name": "default"}], [{"name": "default", "template": 2}], 7],
)
def test_a_list_of_templates_that_is_damaged_is_named(model: Path, template: object):
    (model / "chat_template.jinja").unlink(missing_ok=True)
    change(model / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ConfigError, match=r"chat_template|chat template"):
        load_renderer(str(model), 512)


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
)
def test_a_template_that_is_not_utf8_is_named(model: Path, name: str):
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=f"{Path(name).name} cannot be read"):
        load_renderer(str(model), 512)


def test_several_end_tokens_are_all_known(model: Path):
    change(model / "generation_config.json", eos_token_id=[2, 0])
    check(model)
    assert load_renderer(str(model), 512).end_ids == {0, 2}


def test_a_model_without_an_output_layer_is_refused(tmp_path: Path):
    tied = make_tiny_model(tmp_path / "tied", tie_embeddings=True)
    check(tied)
    change(tied / "config.json", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match="lm_head"):
        check(tied)


@pytest.mark.parametrize(
    ("added", "lost", "reason"),
    [
        ("model.more.weight", "", "model.more.weight first"),
        ("", "model.embed_tokens.weight", "hold no model.embed_tokens.weight"),
    ],
)
def test_an_index_that_contradicts_its_file_is_refused(
    model: Path, added: str, lost: str, reason: str
):
    with safe_open(model / "model.safetensors", framework="np") as tensors:
        names = set(tensors.keys())
    weight_map = dict.fromkeys((names | {added}) - {"", lost}, "model.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=reason):
        check(model)


def test_an_end_token_in_the_map_of_special_tokens_is_enough(model: Path):
    change(model / "tokenizer_config.json", eos_token=None)
    (model / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="eos_token"):
        check(model)
    (model / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}})
    )
    check(model)
