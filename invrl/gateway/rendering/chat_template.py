"""The chat template of a model: the source of its Jinja text, and the conversion of
messages for it.

It is rendered like in transformers (`template_language.py`), so that prompts are those
that the model was trained on.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from invrl.errors import ConfigError
from invrl.gateway.rendering.content_marks import ContentMarks, ControlTokens
from invrl.gateway.rendering.model_text import Template
from invrl.gateway.types import Message, Prompt, Tool, ToolCall
from invrl.user_code.model_folder import (
    ADDITIONAL_TEMPLATES,
    read_optional_json,
    special_tokens,
)
from invrl.user_code.near_path import path_fix

_FOLDER = Path(__file__).parent / "templates"
SHIPPED_TEMPLATES = {
    "chatml-tools": _FOLDER / "chatml_tools.jinja",
    # The short one is for models that lose the thread of a long prompt.
    "chatml-tools-short": _FOLDER / "chatml_tools_short.jinja",
}
"""Chat templates shipped with invrl. A setting may name one instead of a path."""
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Marks the model's output, in templates that have it."""
_NO_CONTROL_TOKENS = ControlTokens()
_NO_PARAMETERS = '{"type": "object", "properties": {}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSources:
    """Jinja texts of a model: some have a separate template for conversations with
    tools."""

    default: str
    tool_use: str

    @classmethod
    def same(cls, text: str) -> "TemplateSources":
        """Return one text for all conversations."""
        return cls(default=text, tool_use=text)


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


def template_sources(
    model_path: str, chat_template: str | None = None
) -> TemplateSources:
    """Return the chat templates, as transformers finds them. `chat_template` is the
    path of a file or the name of a shipped template; None for the model folder's own.
    Raises ConfigError if there is none."""
    if chat_template:
        return TemplateSources.same(read_template(chat_template))
    folder = Path(model_path)
    by_name = _templates_in_files(folder) or _templates_in_settings(folder)
    default = by_name.get("default")
    if not default:
        reason = "the folder has no chat template"
        if by_name:
            reason = f"none of its chat templates ({', '.join(sorted(by_name))}) is named default"
        fix = (
            "choose an instruct model, or give --chat-template-path FILE "
            f"(shipped here: {', '.join(SHIPPED_TEMPLATES)})"
        )
        raise ConfigError("model.model_path", str(folder), reason, fix)
    return TemplateSources(default=default, tool_use=by_name.get("tool_use") or default)


def _templates_in_files(folder: Path) -> dict[str, str]:
    """Return the templates with separate files, by name. They replace those of the
    settings."""
    by_name = {}
    default = folder / "chat_template.jinja"
    if default.exists():
        by_name["default"] = _read_own(default, folder)
    for file in sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja")):
        by_name[file.stem] = _read_own(file, folder)
    return by_name


def _read_own(file: Path, folder: Path) -> str:
    """Read a template of the model folder. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(folder, f"{file.name} cannot be read: {error}") from None


def _templates_in_settings(folder: Path) -> dict[str, str]:
    """Return the templates in tokenizer_config.json: one text, or a list of named
    ones."""
    template = read_optional_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        try:
            named = msgspec.convert(template, list[_NamedTemplate])
        except msgspec.ValidationError as error:
            reason = f"chat_template in tokenizer_config.json is damaged: {error}"
            raise _damaged(folder, reason) from None
        return {entry.name: entry.template for entry in named}
    if isinstance(template, str):
        return {"default": template}
    return {}


def _damaged(folder: Path, reason: str) -> ConfigError:
    fix = "repair it, or give --chat-template-path FILE"
    return ConfigError("model.model_path", str(folder), reason, fix)


def read_template(chat_template: str) -> str:
    """Return the Jinja text of a file, or of a shipped template by its name. Raises
    ConfigError if it cannot be read."""
    file = SHIPPED_TEMPLATES.get(chat_template) or Path(chat_template).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fix = f"give the path of a Jinja file, or a shipped template: {', '.join(SHIPPED_TEMPLATES)}"
        fix = path_fix(file, fix, names=SHIPPED_TEMPLATES)
        raise ConfigError(
            "gateway.chat_template_path", chat_template, str(error), fix
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallForm:
    """Form in which a template expects a message with tool calls."""

    arguments_as_text: bool
    """Whether the arguments are JSON text; otherwise an object."""
    no_content: str | None
    """Content of a reply that has only calls."""


_CALL_FORMS = (
    _CallForm(arguments_as_text=False, no_content=""),
    _CallForm(arguments_as_text=True, no_content=""),
    _CallForm(arguments_as_text=False, no_content=None),
    _CallForm(arguments_as_text=True, no_content=None),
)
_PROBE_CALL = ToolCall("call-1", "probe_tool", '{"probe_key": 1}')
_PROBE = Prompt(
    messages=(Message("user", "x"), Message("assistant", tool_calls=(_PROBE_CALL,)))
)
_PROBE_WITH_TOOLS = replace(_PROBE, tools=(Tool(name="probe_tool"),))


class JinjaTemplate(Template):
    """A chat template in Jinja. Templates differ in how they expect a tool call: the
    constructor renders a probe in each form, and the first form in which the call
    appears is used from then on."""

    def __init__(
        self,
        sources: TemplateSources,
        folder: Path,
        control_tokens: ControlTokens = _NO_CONTROL_TOKENS,
    ) -> None:
        self._sources = sources
        self._content_marks = ContentMarks(control_tokens.contents)
        self._reply_marks = ContentMarks(control_tokens.replies)
        self._special_tokens = special_tokens(folder)
        self._today = datetime.now()
        """Date that templates show. It stays the same past midnight, because all turns
        of a conversation must render the same beginning."""
        self._call_forms: dict[str, _CallForm] = {}
        """Forms by the template's source."""
        self._find_call_form(sources.default, _PROBE)
        if sources.tool_use != sources.default:
            self._find_call_form(sources.tool_use, _PROBE_WITH_TOOLS)

    def __call__(self, prompt: Prompt, *, add_generation_prompt: bool) -> str:
        text, _ = self._render(prompt, add_generation_prompt=add_generation_prompt)
        return text

    def last_marked_reply(self, prompt: Prompt) -> tuple[int, int] | None:
        """Find the last reply by `{% generation %}` blocks, if the template has any."""
        if not _GENERATION_BLOCK.search(self._source(prompt)):
            return None
        _, marks = self._render(prompt, add_generation_prompt=False)
        if not marks:
            return None
        return marks[-1]

    def _render(
        self, prompt: Prompt, *, add_generation_prompt: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and beginning and end of each `{% generation %}` block in
        it."""
        from invrl.gateway.rendering.template_language import render_template

        variables: dict[str, Any] = dict(self._special_tokens)
        variables["add_generation_prompt"] = add_generation_prompt
        variables["strftime_now"] = self._today.strftime
        if prompt.thinking is not None:
            variables["enable_thinking"] = prompt.thinking
            variables["thinking"] = prompt.thinking
        source = self._source(prompt)
        messages = []
        for message in prompt.messages:
            fields = _template_message(message, self._call_forms[source])
            messages.append(self._marked_message(fields))
        tools = [
            self._content_marks.mark(_template_tool(tool)) for tool in prompt.tools
        ]
        variables["messages"] = messages
        variables["tools"] = tools or None
        variables["documents"] = None
        return render_template(source, variables)

    def _marked_message(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        is_reply = fields["role"] == "assistant"
        marked = {}
        for name, value in fields.items():
            marks = self._content_marks
            if is_reply and name in ("content", "reasoning_content"):
                marks = self._reply_marks
            marked[name] = marks.mark(value)
        return marked

    def num_control_tokens(self, messages: Sequence[Message]) -> int:
        """Count the texts of control tokens in the messages, which are rendered as
        plain text."""
        count = 0
        for message in messages:
            text_marks = self._content_marks
            if message.role == "assistant":
                text_marks = self._reply_marks
            count += text_marks.count(message.content) + text_marks.count(
                message.reasoning
            )
            for call in message.tool_calls:
                count += self._content_marks.count(call.arguments)
        return count

    def _source(self, prompt: Prompt) -> str:
        if prompt.tools:
            return self._sources.tool_use
        return self._sources.default

    def _find_call_form(self, source: str, probe: Prompt) -> None:
        for form in _CALL_FORMS:
            self._call_forms[source] = form
            if self._shows_call(probe):
                return
        self._call_forms[source] = _CALL_FORMS[0]

    def _shows_call(self, probe: Prompt) -> bool:
        try:
            text = self(probe, add_generation_prompt=False)
        except Exception:  # a template may raise any exception
            return False
        return _PROBE_CALL.name in text and '"probe_key": 1' in text


def _template_message(message: Message, call_form: _CallForm) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["content"] = message.content or call_form.no_content
        fields["tool_calls"] = [
            _template_call(call, call_form) for call in message.tool_calls
        ]
    return fields


def _template_call(call: ToolCall, call_form: _CallForm) -> dict[str, Any]:
    arguments: Any = call.arguments
    if not call_form.arguments_as_text:
        with contextlib.suppress(ValueError):
            parsed = json.loads(call.arguments)
            # Half of a surrogate pair cannot be encoded: such arguments stay text.
            json.dumps(parsed, ensure_ascii=False).encode()
            arguments = parsed
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _template_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool in OpenAI's form, in which transformers passes tools to
    templates."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": json.loads(tool.parameters or _NO_PARAMETERS),
    }
    return {"type": "function", "function": function}
