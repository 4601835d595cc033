"""The JSON files of a model folder that describe its tokens."""

import json
from pathlib import Path
from typing import Any


def read_json(file: Path) -> dict[str, Any]:
    """The content of the file; an empty dictionary if there is no such file."""
    if not file.exists():
        return {}
    return json.loads(file.read_text(encoding="utf-8"))


def special_tokens(folder: Path) -> dict[str, str]:
    """The texts of the special tokens by their names (`bos_token`, ...), which chat templates may use.
    tokenizer_config.json takes precedence over special_tokens_map.json."""
    texts: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, token in read_json(folder / file).items():
            text = token
            if isinstance(token, dict):
                text = token.get("content")
            if name.endswith("_token") and isinstance(text, str):
                texts[name] = text
    return texts


def end_ids(folder: Path) -> set[int]:
    """The ids of the end tokens that the model's own settings name. Engines stop at them."""
    ids: set[Any] = set()
    for name in ("config.json", "generation_config.json"):
        setting = read_json(folder / name).get("eos_token_id")
        if isinstance(setting, list):
            ids.update(setting)
        else:
            ids.add(setting)
    ids.discard(None)
    return ids
