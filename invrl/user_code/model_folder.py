"""The check of a model folder: its required content, read only from its files and
without torch.

Invariant: a folder that passes can be read by the engine (transformers' tokenizer and
config), the trainer (safetensors by Hugging Face names) and the gateway (tokenizer),
which do not check these rules again. Two things are not checked here. The trainer
refuses features that it does not compute (`families/hf_config.py`). The gateway reads
the chat template, or the one of `--chat-template-path`.
"""

import difflib
import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from tokenizers.models import BPE

from invrl.errors import ConfigError
from invrl.user_code.near_path import path_fix

_PREPARE = "give a Hugging Face model folder; `invrl prepare-model` makes one"
_SAVE_TOKENIZER = (
    "save the tokenizer with transformers in the fast format "
    "(`invrl prepare-model --from-folder` does it)"
)
ADDITIONAL_TEMPLATES = "additional_chat_templates"
"""Folder of a model's chat templates in addition to its default one
(`tool_use.jinja`)."""
_TIED_BY_DEFAULT = {"gemma3_text"}
"""Model types whose output layer is the embedding unless config.json says otherwise."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _refuse(path: Path, reason: str, fix: str = _PREPARE) -> ConfigError:
    return ConfigError("model.model_path", str(path), reason, fix)


def check_model_folder(path: Path, *, families: Collection[str]) -> None:
    """Check an existing folder. Raises ConfigError (field model.model_path) for the
    first thing that is missing or broken. `families`: the supported model types
    (`families/registry.py`)."""
    if (path / "megatron").is_dir():
        raise _refuse(
            path,
            "a checkpoint without a folder hugging_face",
            "give another checkpoint",
        )
    if (path / "adapter_config.json").is_file():
        raise _refuse(
            path,
            "it holds an adapter, not a whole model",
            "merge it into its base with `invrl export RUN`, and give the folder that this writes; or serve it "
            "beside its base: `invrl serve --model-path BASE --adapter NAME=FOLDER`",
        )
    config = _read_json(path / "config.json", path)
    vocab_size = _check_config(path, config, families)
    _check_weights(path, config, vocab_size)
    end_ids(path)
    tokenizer = read_tokenizer(path)
    highest_id = max(tokenizer.get_vocab().values(), default=-1)
    if highest_id >= vocab_size:  # an id out of the vocabulary kills an engine
        raise _refuse(
            path, f"the tokenizer has id {highest_id}, the model {vocab_size} rows"
        )
    _read_json(path / "tokenizer_config.json", path)
    if not special_tokens(path).get("eos_token"):
        raise _refuse(
            path, "its tokenizer has no eos_token, so a turn could not end by itself"
        )


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of the folder, which may have no weights: rendering needs
    none. Truncation, padding and dropout, which may be saved with it, are turned off:
    it encodes whole texts, and equal texts alike. Raises ConfigError if tokenizer.json
    is missing or broken, or if tokenizer_config.json contradicts it."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise _refuse(path, "it has no tokenizer.json", _SAVE_TOKENIZER)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise _refuse(
            path, f"tokenizer.json cannot be read: {error}", _SAVE_TOKENIZER
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, BPE):
        tokenizer.model.dropout = None
    settings_file = path / "tokenizer_config.json"
    if not settings_file.exists():
        return tokenizer
    added_tokens = _read_json(settings_file, path).get("added_tokens_decoder") or {}
    try:
        ids = {
            token["content"]: int(token_id) for token_id, token in added_tokens.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"added_tokens_decoder in tokenizer_config.json is damaged: {error!r}"
        raise _refuse(path, reason, _SAVE_TOKENIZER) from error
    for text, token_id in ids.items():
        if tokenizer.token_to_id(text) != token_id:
            reason = f"tokenizer_config.json and tokenizer.json differ on {text!r}"
            raise _refuse(path, reason, _SAVE_TOKENIZER)
    return tokenizer


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of the special tokens by name (`bos_token`, ...), which chat
    templates may use. tokenizer_config.json takes precedence over
    special_tokens_map.json."""
    texts: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, token in read_optional_json(folder / file).items():
            text = token
            if isinstance(token, dict):
                text = token.get("content")
            if name.endswith("_token") and isinstance(text, str):
                texts[name] = text
    return texts


def end_ids(folder: Path) -> set[int]:
    """Return the ids of the end tokens that the model's own settings name. Engines stop
    at them. Raises ConfigError for a setting that is not an id or a list of ids."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        setting = read_optional_json(folder / name).get("eos_token_id")
        if setting is None:
            continue
        settings = setting if isinstance(setting, list) else [setting]
        for token_id in settings:
            if (
                not isinstance(token_id, int)
                or isinstance(token_id, bool)
                or token_id < 0
            ):
                reason = f"eos_token_id in {name} is {setting!r}"
                raise _refuse(
                    folder, reason, "write the id of a token there, or a list of ids"
                )
            ids.add(token_id)
    return ids


def read_optional_json(file: Path) -> dict[str, Any]:
    """Return the content of a file of a model folder; an empty dictionary if there is
    no such file. Raises ConfigError if it is damaged."""
    if not file.exists():
        return {}
    return _read_json(file, file.parent)


def check_is_folder(field: str, given: str, folder: Path) -> None:
    """Raise ConfigError if there is no such folder. `given`: the path as the user wrote
    it. If it looks like the id of a model on a hub, the error says so: invrl reads only
    folders."""
    if folder.is_dir():
        return
    plausible_path = Path(given).expanduser().parent
    if not _HUB_ID.fullmatch(given) or plausible_path.is_dir():
        raise ConfigError(
            field, given, "no such folder", path_fix(Path(given), _PREPARE)
        )
    reason = "no such folder: it looks like the id of a model on a hub, and invrl takes folders"
    fix = f"download it (`hf download {given} --local-dir FOLDER`), and give FOLDER"
    cached = _in_hub_cache(given)
    if cached is not None:
        fix = f"it has been downloaded before: give {cached}"
    raise ConfigError(field, given, reason, fix)


def _in_hub_cache(model_id: str) -> Path | None:
    """Return the newest snapshot of the model in the hub client's cache on this
    machine."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    snapshots = cache.glob(
        f"models--{model_id.replace('/', '--')}/snapshots/*/config.json"
    )
    newest = max(snapshots, key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        return None
    return newest.parent


def read_model_type(path: Path) -> object:
    """Return the `model_type` of the folder's config.json. Raises ConfigError if that
    file cannot be read."""
    return _read_json(path / "config.json", path).get("model_type")


def supported_families(wanted: object, families: Collection[str]) -> str:
    """Return the names of all families, for an error message, and the one most like the
    wanted one."""
    text = ", ".join(sorted(families))
    nearest = difflib.get_close_matches(str(wanted), sorted(families), n=1, cutoff=0.65)
    if nearest:
        text += f" (the nearest is {nearest[0]})"
    return text


def has_chat_template(path: Path) -> bool:
    """Whether the folder has a chat template, which may be broken."""
    settings = _read_json(path / "tokenizer_config.json", path)
    return (
        bool(settings.get("chat_template")) or (path / "chat_template.jinja").is_file()
    )


def _read_json(path: Path, folder: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _refuse(folder, f"it has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _refuse(folder, f"{path.name} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise _refuse(folder, f"{path.name} is not a JSON object")
    return value


def _check_config(path: Path, config: dict[str, Any], families: Collection[str]) -> int:
    """Check config.json. Returns the size of the vocabulary that it declares."""
    model_type = config.get("model_type")
    vocab_size = config.get("vocab_size")
    if model_type not in families:
        reason = f"model_type is {model_type!r}, which is not supported"
        raise _refuse(
            path,
            reason,
            f"choose a model of type {supported_families(model_type, families)}",
        )
    if config.get("quantization_config"):
        raise _refuse(path, "its weights are quantized; training needs plain ones")
    if not isinstance(vocab_size, int):
        raise _refuse(path, f"vocab_size in config.json is {vocab_size!r}")
    return vocab_size


def tensor_files(path: Path) -> dict[str, Path]:
    """Return the safetensors file of each tensor, by the index. Raises ConfigError if
    the index is broken."""
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if not index.exists():
        return dict.fromkeys(_shapes(single), single)
    weight_map = _read_json(index, path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _refuse(path, f"{index.name} has no weight_map")
    return {name: path / str(file) for name, file in weight_map.items()}


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor of the index. Raises ConfigError for a shard that
    is incomplete, or that lacks a tensor of the index."""
    files = tensor_files(path)
    by_shard = {shard: _shapes(shard) for shard in sorted(set(files.values()))}
    missing = [name for name, shard in files.items() if name not in by_shard[shard]]
    if missing:
        raise _refuse(
            path,
            f"{len(missing)} tensors of the index are not in their files, {missing[0]} first",
        )
    return {name: by_shard[shard][name] for name, shard in files.items()}


_ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


def largest_item(path: Path) -> int:
    """Return the bytes of a number in the widest dtype of a folder's weights (1 for
    those of 8 bits)."""
    largest = 1
    for shard in set(tensor_files(path).values()):
        with safe_open(shard, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                largest = max(
                    largest, _ITEM_BYTES.get(tensors.get_slice(name).get_dtype(), 1)
                )
    return largest


def _shapes(shard: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor in the file. Raises ConfigError unless its size
    fits its header."""
    if not shard.is_file():
        raise _refuse(
            shard.parent,
            f"it has no {shard.name} (weights in other formats are not read)",
        )
    try:
        with safe_open(shard, framework="np") as tensors:
            return {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _refuse(shard.parent, f"{shard.name} is damaged: {error}") from error


def _check_weights(path: Path, config: dict[str, Any], vocab_size: int) -> None:
    """Check that every shard is complete and has its tensors of the index, that the
    embedding has a row for every id of the vocabulary, and that there is an output
    layer."""
    shapes = tensor_shapes(path)
    embedding = shapes.get("model.embed_tokens.weight")
    if embedding is None:
        raise _refuse(path, "the weights hold no model.embed_tokens.weight")
    if embedding[0] != vocab_size:
        raise _refuse(
            path, f"vocab_size is {vocab_size}, the embedding has {embedding[0]} rows"
        )
    is_tied = config.get(
        "tie_word_embeddings", config.get("model_type") in _TIED_BY_DEFAULT
    )
    if not is_tied and "lm_head.weight" not in shapes:
        reason = "the weights hold no lm_head.weight, and tie_word_embeddings is not true in config.json"
        raise _refuse(
            path,
            reason,
            "give a complete model, or one whose config.json ties the embeddings",
        )
