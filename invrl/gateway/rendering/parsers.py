"""Which parsers read the replies of a model, and the grammar that forces the form of a reply.

The parsers are SGLang's. Importing them takes seconds and 500 MB (they import torch), so they are imported
only for a model whose chat template has tools or thinking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from invrl.errors import ConfigError, SessionError
from invrl.gateway.rendering.call_grammar import reply_grammar
from invrl.gateway.rendering.call_parser import call_parser
from invrl.gateway.rendering.call_reader import CallReader
from invrl.gateway.rendering.reply_parser import ReplyParser, reasoning_parser
from invrl.gateway.types import Tool, ToolChoice
from invrl.types import Json

_CALLS_BY_MARK = (
    ("<|python_tag|>", "llama3"),
    ("ipython", "llama3"),
    ("｜DSML｜", "deepseekv32"),
    ("<｜tool▁calls▁begin｜>", "deepseekv3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "qwen25"),
)
"""A text in a chat template, and SGLang's parser of the calls that such a template asks for."""
_REASONING_BY_MARK = (
    ("enable_thinking", "qwen3"),
    ("thinking is defined", "deepseek-v3"),
    ("</think>", "deepseek-r1"),
)
"""The same for SGLang's parsers of reasoning."""


def detect_parsers(template: str) -> tuple[str, str]:
    """SGLang's names of the tool-call parser and the reasoning parser for a chat template; "" for none."""
    tool_calls = ""
    if "tools" in template:
        tool_calls = _first_marked(_CALLS_BY_MARK, template)
    if tool_calls == "deepseekv3" and "```json" not in template:
        tool_calls = "deepseekv31"
    return tool_calls, _first_marked(_REASONING_BY_MARK, template)


def _first_marked(marks: Sequence[tuple[str, str]], template: str) -> str:
    """The name that belongs to the first mark in the template; "" if it has none of them."""
    for mark, name in marks:
        if mark in template:
            return name
    return ""


def choose_parsers(tool_calls: str, reasoning: str, *, template: str) -> Parsers:
    """The parsers by the names in the settings: SGLang's names, "auto" (by the chat template) or "none"."""
    detected_calls, detected_reasoning = detect_parsers(template)
    return Parsers(
        tool_calls=_chosen(tool_calls, detected_calls),
        reasoning=_chosen(reasoning, detected_reasoning),
    )


def _chosen(setting: str, detected: str) -> str:
    if setting == "auto":
        return detected
    if setting == "none":
        return ""
    return setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsers:
    """SGLang's names of the served model's parsers. Without a name, that part of a reply stays content."""

    tool_calls: str = ""
    reasoning: str = ""

    def preload(self) -> None:
        """Imports what `reply` needs, before the first request has to wait for it. ConfigError for a name
        that SGLang does not have."""
        try:
            if self.tool_calls:
                call_parser(self.tool_calls, ())
        except ValueError as error:
            raise _unknown_parser("tool_call_parser", self.tool_calls, error) from None
        try:
            if self.reasoning:
                reasoning_parser(self.reasoning, in_thinking=False)
        except ValueError as error:
            raise _unknown_parser("reasoning_parser", self.reasoning, error) from None

    def reply(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        parallel: bool,
        prompt_text: str,
        stream: bool,
        turn_id: str = "",
    ) -> ReplyParser:
        """The parser of one reply. `prompt_text` is the end of the prompt, `turn_id` the turn of the reply.
        `parallel`: calls after the first are kept."""
        if not self.reasoning and not (self.tool_calls and tools):
            return ReplyParser()
        calls = None
        if tools and choice.mode != "none":
            calls = CallReader(
                self.tool_calls,
                [tool for tool in tools if not choice.allowed or tool.name in choice.allowed],
                turn_id=turn_id,
                max_calls=None if parallel else 1,
                stream=stream,
            )
        reasoning = None
        if self.reasoning:
            in_thinking = prompt_text.rstrip().endswith("<think>")
            reasoning = reasoning_parser(self.reasoning, in_thinking=in_thinking)
        return ReplyParser(reasoning, calls, stream=stream)

    def constraint(
        self, tools: tuple[Tool, ...], choice: ToolChoice, *, parallel: bool, schema: str = ""
    ) -> Mapping[str, Json]:
        """SGLang's sampling parameters that force the form of the reply; empty if nothing is forced. `schema`
        is the JSON schema of a reply without calls, "" for none. If the model may call tools and there is a
        schema, the reply is either calls or follows the schema. SessionError 400 if no grammar can be made of
        the tools."""
        if choice.mode in ("required", "named"):
            schema = ""
        elif not schema:
            return {}
        elif not tools or choice.mode == "none":
            return {"json_schema": schema}
        try:
            return {"ebnf": reply_grammar(self.tool_calls, tools, choice, parallel, schema)}
        except (RuntimeError, ValueError) as error:  # what xgrammar and SGLang raise for an unusable schema
            reason = f"these tools cannot be forced: {error}"
            raise SessionError(reason, status=400, code="invalid_value", param="tools") from None


def _unknown_parser(field: str, name: str, error: ValueError) -> ConfigError:
    fix = "take a name from `python -m sglang.launch_server --help`, auto, or none"
    return ConfigError(f"gateway.{field}", name, str(error), fix)
