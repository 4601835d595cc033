"""What a model folder must hold before a run starts: checked from the files alone, without torch.
Invariant: a folder that passes can be read by the engine (transformers' tokenizer and config), the
trainer (safetensors by Hugging Face names) and the gateway (chat template). Called by `cli.py` before
`train` and `serve`, and by `prepare_model.py` on what it made; `train/weights.py` asks where tensors are."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from invrl.errors import ConfigError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
PREPARE = "make a ready folder with `invrl prepare-model`"


def _refuse(path: Path, reason: str, fix: str = PREPARE) -> ConfigError:
    return ConfigError("model.model_path", str(path), reason, fix)


def check_model_folder(path: Path) -> None:
    """Raises ConfigError (field model.model_path) for the first thing that is missing or broken."""
    if not path.is_dir():
        raise _refuse(path, "no such folder", f"give --model-path, or {PREPARE}")
    if (path / "megatron").is_dir():
        raise _refuse(path, "a checkpoint without a folder hugging_face", "give another checkpoint")
    vocab_size = _check_config(path)
    _check_weights(path, vocab_size)
    _check_tokenizer(path, vocab_size)


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


def _check_config(path: Path) -> int:
    """The vocabulary size that config.json declares."""
    config = _read_json(path / "config.json", path)
    model_type, vocab_size = config.get("model_type"), config.get("vocab_size")
    if model_type not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise _refuse(path, f"model_type is {model_type!r}", f"choose a model of type {supported}")
    if config.get("quantization_config"):
        raise _refuse(path, "its weights are quantized; training needs plain ones")
    if not isinstance(vocab_size, int):
        raise _refuse(path, f"vocab_size in config.json is {vocab_size!r}")
    return vocab_size


def tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it, as the index says. ConfigError if it is broken."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
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
    """Every shard is whole, and the index tells the truth."""
    files = tensor_files(path)
    found = {name: shape for shard in sorted(set(files.values())) for name, shape in _shapes(shard).items()}
    if missing := sorted(files.keys() - found):
        raise _refuse(path, f"{len(missing)} tensors of the index are in no shard, {missing[0]} first")
    if (embedding := found.get("model.embed_tokens.weight")) is None:
        raise _refuse(path, "the weights hold no model.embed_tokens.weight")
    if embedding[0] != vocab_size:
        raise _refuse(path, f"vocab_size is {vocab_size}, the embedding has {embedding[0]} rows")


def _check_tokenizer(path: Path, vocab_size: int) -> None:
    if not (file := path / "tokenizer.json").is_file():
        raise _refuse(path, "it has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise _refuse(path, f"tokenizer.json cannot be read: {error}") from error
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= vocab_size:  # an id out of the vocabulary kills an engine
        raise _refuse(path, f"the tokenizer has id {highest}, the model {vocab_size} rows")
    settings = _read_json(path / "tokenizer_config.json", path)
    if not settings.get("chat_template") and not (path / "chat_template.jinja").is_file():
        fix = "choose an instruct model, or add a template"
        raise _refuse(path, "its tokenizer has no chat template", fix)
    if not settings.get("eos_token"):
        raise _refuse(path, "its tokenizer has no eos_token, so a turn could not end by itself")
