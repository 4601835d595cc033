"""The renderer of a model folder: its tokenizer.json, its chat template, its end tokens.

Reads the files itself and renders with transformers' own template function: transformers' tokenizer
classes import torch, which would cost the gateway many seconds and 350 MB for nothing. That both
agree is tested. Called once, by `gateway_server.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invrl.errors import ConfigError
from invrl.gateway.forest import Message
from invrl.gateway.rendering import Renderer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_renderer(model_path: str, vocab_size: int) -> Renderer:
    """ConfigError where the folder has no tokenizer.json or chat template, or the two files that
    describe its tokens differ."""
    folder = Path(model_path)
    settings = _read(folder / "tokenizer_config.json")
    backend = _load_tokenizer(folder, settings)
    special = _special_tokens(folder, settings)
    end_of_text = backend.token_to_id(special.get("eos_token", ""))
    end_ids = frozenset(_end_ids(folder) | (set() if end_of_text is None else {end_of_text}))
    template = _template(_chat_template(folder, settings), special)
    return Renderer(template, _FastTokenizer(backend), end_ids=end_ids, vocab_size=vocab_size)


class _FastTokenizer:
    """The Rust tokenizer: nothing added when it encodes, special tokens hidden when it decodes."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=True)


def _load_tokenizer(folder: Path, settings: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.exists():
        raise _unfit(folder, "the folder has no tokenizer.json", "convert its tokenizer to the fast format")
    backend = Tokenizer.from_file(str(file))
    for token_id, token in settings.get("added_tokens_decoder", {}).items():
        if backend.token_to_id(token["content"]) != int(token_id):
            reason = f"tokenizer_config.json and tokenizer.json differ on {token['content']!r}"
            raise _unfit(folder, reason, "save the tokenizer again with transformers")
    return backend


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):  # named templates
        template = {item["name"]: item["template"] for item in template}.get("default")
    if not template:
        raise _unfit(folder, "the folder has no chat template", "add a chat_template.jinja")
    return str(template)


def _template(source: str, special: Mapping[str, str]) -> Callable[[Sequence[Message], bool], str]:
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: Sequence[Message], add_generation_prompt: bool) -> str:
        plain = [{"role": message.role, "content": message.content} for message in messages]
        variables: dict[str, Any] = {**special, "add_generation_prompt": add_generation_prompt}
        rendered, _ = render_jinja_template(conversations=[plain], chat_template=source, **variables)
        return rendered[0]

    return render


def _special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name (`bos_token`, ...), which templates may use."""
    named: dict[str, str] = {}
    for source in (_read(folder / "special_tokens_map.json"), settings):
        for name, token in source.items():
            text = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(text, str):
                named[name] = text
    return named


def _end_ids(folder: Path) -> set[int]:
    """The end tokens that the model's own settings name; engines stop at them."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        named = _read(folder / name).get("eos_token_id")
        ids.update(named if isinstance(named, list) else [] if named is None else [named])
    return ids


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def _unfit(folder: Path, reason: str, fix: str) -> ConfigError:
    return ConfigError("model_path", str(folder), reason, fix)
