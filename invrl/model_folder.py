"""What a model folder must hold before a run starts: checked from the files alone, without torch.

Invariant: a folder that passes can be read by the engine (transformers' tokenizer and config), the trainer
(safetensors by Hugging Face names) and the gateway (tokenizer). Its chat template is not looked at here:
`--chat-template-path` may take its place, and the gateway's own reader checks whichever it is."""

import json
import os
import re
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from invrl.errors import ConfigError

PREPARE = "make a ready folder with `invrl prepare-model`"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _refuse(path: Path, reason: str, fix: str = PREPARE) -> ConfigError:
    return ConfigError("model.model_path", str(path), reason, fix)


def check_model_folder(path: Path, *, families: Collection[str]) -> None:
    """Raises ConfigError (field model.model_path) for the first thing that is missing or broken. `families`:
    the model types that are supported (`train/families/registry.py`)."""
    if not path.is_dir():
        raise no_such_folder("model.model_path", str(path))
    if (path / "megatron").is_dir():
        raise _refuse(path, "a checkpoint without a folder hugging_face", "give another checkpoint")
    vocab_size = _check_config(path, families)
    _check_weights(path, vocab_size)
    _check_tokenizer(path, vocab_size)


def no_such_folder(field: str, given: str) -> ConfigError:
    """For a model path that is no folder, as it was given. One that looks like the id of a model on a hub is
    called so: invrl reads folders only."""
    plausible_path = Path(given).expanduser().parent
    if not _HUB_ID.fullmatch(given) or plausible_path.is_dir():
        return ConfigError(field, given, "no such folder", f"give --model-path, or {PREPARE}")
    reason = "no such folder: it looks like the id of a model on a hub, and invrl takes folders"
    fix = f"download it (`hf download {given} --local-dir FOLDER`), and give FOLDER"
    cached = _in_hub_cache(given)
    if cached is not None:
        fix = f"it has been downloaded before: give {cached}"
    return ConfigError(field, given, reason, fix)


def _in_hub_cache(model_id: str) -> Path | None:
    """The newest snapshot of the model that the hub's own client has on this machine."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    snapshots = cache.glob(f"models--{model_id.replace('/', '--')}/snapshots/*/config.json")
    newest = max(snapshots, key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        return None
    return newest.parent


def read_model_type(path: Path) -> object:
    """What the folder's config.json says. ConfigError if it has none that can be read."""
    return _read_json(path / "config.json", path).get("model_type")


def has_chat_template(path: Path) -> bool:
    """Whether the folder brings one, in whatever state."""
    settings = _read_json(path / "tokenizer_config.json", path)
    return bool(settings.get("chat_template")) or (path / "chat_template.jinja").is_file()


def _read_json(path: Path, folder: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise _refuse(folder, f"it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise _refuse(folder, f"{path.name} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise _refuse(folder, f"{path.name} is not a JSON object")
    return value


def _check_config(path: Path, families: Collection[str]) -> int:
    """The vocabulary size that config.json declares."""
    config = _read_json(path / "config.json", path)
    model_type = config.get("model_type")
    vocab_size = config.get("vocab_size")
    if model_type not in families:
        fix = f"choose a model of type {', '.join(sorted(families))}"
        raise _refuse(path, f"model_type is {model_type!r}, which is not supported", fix)
    if config.get("quantization_config"):
        raise _refuse(path, "its weights are quantized; training needs plain ones")
    if not isinstance(vocab_size, int):
        raise _refuse(path, f"vocab_size in config.json is {vocab_size!r}")
    return vocab_size


def tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it, as the index says. ConfigError if it is broken."""
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if not index.exists():
        return dict.fromkeys(_shapes(single), single)
    weight_map = _read_json(index, path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _refuse(path, f"{index.name} has no weight_map")
    return {name: path / str(file) for name, file in weight_map.items()}


def _shapes(shard: Path) -> dict[str, list[int]]:
    """Of all tensors in a file that is whole: its header fits its size."""
    if not shard.is_file():
        raise _refuse(shard.parent, f"it has no {shard.name} (weights in other formats are not read)")
    try:
        with safe_open(shard, framework="np") as tensors:
            return {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _refuse(shard.parent, f"{shard.name} is damaged: {error}") from error


def _check_weights(path: Path, vocab_size: int) -> None:
    """Every shard is whole, every tensor of the index is in a shard, and the embedding has a row for every
    id of the vocabulary."""
    files = tensor_files(path)
    shapes: dict[str, list[int]] = {}
    for shard in sorted(set(files.values())):
        shapes |= _shapes(shard)
    missing = sorted(files.keys() - shapes)
    if missing:
        raise _refuse(path, f"{len(missing)} tensors of the index are in no shard, {missing[0]} first")
    embedding = shapes.get("model.embed_tokens.weight")
    if embedding is None:
        raise _refuse(path, "the weights hold no model.embed_tokens.weight")
    if embedding[0] != vocab_size:
        raise _refuse(path, f"vocab_size is {vocab_size}, the embedding has {embedding[0]} rows")


def _check_tokenizer(path: Path, vocab_size: int) -> None:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise _refuse(path, "it has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise _refuse(path, f"tokenizer.json cannot be read: {error}") from error
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= vocab_size:  # an id out of the vocabulary kills an engine
        raise _refuse(path, f"the tokenizer has id {highest}, the model {vocab_size} rows")
    settings = _read_json(path / "tokenizer_config.json", path)
    if not settings.get("eos_token"):
        raise _refuse(path, "its tokenizer has no eos_token, so a turn could not end by itself")
