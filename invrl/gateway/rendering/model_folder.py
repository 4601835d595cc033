"""The renderer of a model folder: its tokenizer.json, its chat template, its end tokens.

Reads the files itself and renders with transformers' own template function: transformers' tokenizer
classes import torch, which would cost the gateway many seconds and 350 MB for nothing. That both
agree is tested. Called once, by `gateway_server.py`."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from invrl.errors import ConfigError
from invrl.gateway.rendering.renderer import LARGE_TEXT, PromptTooLong, Renderer, Template
from invrl.gateway.rendering.token_bound import TokenBound, token_bound
from invrl.gateway.types import Message, Prompt, Tool, ToolCall

_TEMPLATES = Path(__file__).parent / "templates"
SHIPPED_TEMPLATES = {
    "chatml-tools": _TEMPLATES / "chatml_tools.jinja",
    "chatml-tools-short": _TEMPLATES
    / "chatml_tools_short.jinja",  # for models that lose a long prompt's thread
}
"""Chat templates that can be given by their names."""


def load_renderer(
    model_path: str, vocab_size: int, *, chat_template: str = "", keep_thinking: bool = True
) -> Renderer:
    """`chat_template`: a file to use instead of the folder's own. ConfigError where the folder has no
    tokenizer.json or chat template, or the two files that describe its tokens differ."""
    folder = Path(model_path)
    settings = _read(folder / "tokenizer_config.json")
    backend = _load_tokenizer(folder, settings)
    special = _special_tokens(folder, settings)
    end_of_text = backend.token_to_id(special.get("eos_token", ""))
    end_ids = frozenset(_end_ids(folder) | (set() if end_of_text is None else {end_of_text}))
    template = _JinjaTemplate(chat_template_source(model_path, chat_template), special)
    tokenizer = _FastTokenizer(backend, token_bound(_read(folder / "tokenizer.json")))
    return Renderer(template, tokenizer, end_ids=end_ids, vocab_size=vocab_size, keep_thinking=keep_thinking)


class _FastTokenizer:
    """The Rust tokenizer: nothing added when it encodes."""

    def __init__(self, backend: Tokenizer, bound: TokenBound | None) -> None:
        self._backend = backend
        self._bound = bound

    def encode(self, text: str, *, most: int | None = None) -> list[int]:
        if len(text) < LARGE_TEXT:
            encoding = self._backend.encode(text, add_special_tokens=False)
        else:
            # Of the two only this one lets other threads run meanwhile.
            encoding = self._backend.encode_batch([text], add_special_tokens=False)[0]
        if most is not None and len(encoding) > most:  # millions of ids are counted, not made
            raise PromptTooLong(len(encoding), exact=True)
        return encoding.ids

    def least(self, text: str) -> int:
        return 0 if self._bound is None else self._bound.least(text)

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        return self._backend.decode(ids, skip_special_tokens=not special)


def _load_tokenizer(folder: Path, settings: Mapping[str, Any]) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise _unfit(folder, "the folder has no tokenizer.json", "convert its tokenizer to the fast format")
    backend = Tokenizer.from_file(str(file))
    for token_id, token in settings.get("added_tokens_decoder", {}).items():
        if backend.token_to_id(token["content"]) != int(token_id):
            reason = f"tokenizer_config.json and tokenizer.json differ on {token['content']!r}"
            raise _unfit(folder, reason, "save the tokenizer again with transformers")
    return backend


def chat_template_source(model_path: str, chat_template: str = "") -> str:
    """The Jinja text: of the file `chat_template`, or of the shipped template of that name, or of the model
    folder. ConfigError if there is none."""
    folder = Path(model_path)
    if chat_template:
        try:
            return SHIPPED_TEMPLATES.get(chat_template, Path(chat_template).expanduser()).read_text()
        except (OSError, UnicodeDecodeError) as error:
            fix = f"give the path of a Jinja file, or a shipped template: {', '.join(SHIPPED_TEMPLATES)}"
            raise ConfigError("gateway.chat_template_path", chat_template, str(error), fix) from None
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template = _read(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # named templates
        template = {item["name"]: item["template"] for item in template}.get("default")
    if not template:
        fix = (
            "choose an instruct model, or give --chat-template-path FILE "
            f"(shipped here: {', '.join(SHIPPED_TEMPLATES)})"
        )
        raise _unfit(folder, "the folder has no chat template", fix)
    return str(template)


class _JinjaTemplate(Template):
    """Templates differ in what they want of a tool call: its arguments as an object or as text, and no
    content as "" or as none. Which of them shows a call is tried once."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._source, self._special = source, special
        self._started = datetime.now()
        """The date that templates show: one day for all of a conversation's turns, also over midnight."""
        self._arguments_as_text, self._no_content = False, ""
        call = ToolCall("call-1", "probe_tool", '{"probe_key": 1}')
        probe = Prompt(messages=(Message("user", "x"), Message("assistant", tool_calls=(call,))))
        for as_text, empty in ((False, ""), (True, ""), (False, None), (True, None)):
            self._arguments_as_text, self._no_content = as_text, empty
            try:
                text = self(probe, add_generation_prompt=False)
            except Exception:  # templates raise what they like
                continue
            if "probe_tool" in text and '"probe_key": 1' in text:
                return
        self._arguments_as_text, self._no_content = False, ""

    def __call__(self, prompt: Prompt, *, add_generation_prompt: bool) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        variables: dict[str, Any] = {**self._special, "add_generation_prompt": add_generation_prompt}
        variables["strftime_now"] = self._started.strftime
        if prompt.thinking is not None:
            variables |= {"enable_thinking": prompt.thinking, "thinking": prompt.thinking}
        rendered, _ = render_jinja_template(
            conversations=[[self._shown(message) for message in prompt.messages]],
            tools=[_tool(tool) for tool in prompt.tools] or None,
            chat_template=self._source,
            **variables,
        )
        return rendered[0]

    def _shown(self, message: Message) -> dict[str, Any]:
        shown: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            shown["reasoning_content"] = message.reasoning
        if message.tool_call_id:
            shown["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            shown["content"] = message.content or self._no_content
            shown["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return shown

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments: Any = call.arguments
        if not self._arguments_as_text:
            with contextlib.suppress(ValueError):
                read = json.loads(call.arguments)
                json.dumps(read, ensure_ascii=False).encode()  # half a surrogate pair is no text
                arguments = read
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _tool(tool: Tool) -> dict[str, Any]:
    """As transformers shows tools to templates: OpenAI's form."""
    parameters = json.loads(tool.parameters or '{"type": "object", "properties": {}}')
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name (`bos_token`, ...), which templates may use."""
    tokens = [*_read(folder / "special_tokens_map.json").items(), *settings.items()]
    texts = [(name, token.get("content") if isinstance(token, dict) else token) for name, token in tokens]
    return {name: text for name, text in texts if name.endswith("_token") and isinstance(text, str)}


def _end_ids(folder: Path) -> set[int]:
    """The end tokens that the model's own settings name; engines stop at them."""
    named = [_read(folder / file).get("eos_token_id") for file in ("config.json", "generation_config.json")]
    return {each for ids in named for each in (ids if isinstance(ids, list) else [ids]) if each is not None}


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def _unfit(folder: Path, reason: str, fix: str) -> ConfigError:
    return ConfigError("model.model_path", str(folder), reason, fix)
