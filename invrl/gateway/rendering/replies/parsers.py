"""Parsers of a model's replies, and the grammar that forces the form of a reply.

The parsers are SGLang's. Importing them takes seconds and 500 MB (they import torch),
so they are imported only for a model whose chat template has tools or thinking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from invrl.errors import ConfigError, SessionError
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.parser_detection import (
    detect_call_parser,
    detect_reasoning_parser,
)
from invrl.gateway.rendering.replies.reply_parser import ReplyParser, reasoning_parser
from invrl.gateway.rendering.tool_calls.call_grammar import reply_grammar
from invrl.gateway.rendering.tool_calls.call_parser import call_parser
from invrl.gateway.rendering.tool_calls.call_reader import CallReader
from invrl.gateway.types import Tool, ToolChoice
from invrl.types.tasks import Json


def choose_parsers(tool_calls: str, reasoning: str, renderer: Renderer) -> Parsers:
    """Return the parsers by the names in the settings: SGLang's names, "auto" (the
    first one that reads what the chat template writes) or "none"."""
    if tool_calls == "auto":
        tool_calls = detect_call_parser(renderer)
    if reasoning == "auto":
        reasoning = detect_reasoning_parser(renderer)
    return named_parsers(tool_calls, reasoning)


def named_parsers(tool_calls: str, reasoning: str) -> Parsers:
    """Return the parsers of these names; "none" or "" for none."""
    return Parsers(
        tool_calls="" if tool_calls == "none" else tool_calls,
        reasoning="" if reasoning == "none" else reasoning,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsers:
    """SGLang's names of the served model's parsers. Without a name, that part of a
    reply stays content."""

    tool_calls: str = ""
    reasoning: str = ""

    def preload(self) -> None:
        """Import what `reply` needs, before the first request has to wait for it.
        Raises ConfigError for a name that SGLang does not have."""
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
        """Return the parser of one reply. `prompt_text` is the end of the prompt,
        `turn_id` the turn of the reply. `parallel`: calls after the first are kept."""
        if not self.reasoning and not (self.tool_calls and tools):
            return ReplyParser()
        calls = None
        if tools and choice.mode != "none":
            calls = CallReader(
                self.tool_calls,
                [
                    tool
                    for tool in tools
                    if not choice.allowed or tool.name in choice.allowed
                ],
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
        self,
        tools: tuple[Tool, ...],
        choice: ToolChoice,
        *,
        parallel: bool,
        schema: str = "",
    ) -> Mapping[str, Json]:
        """Return SGLang's sampling parameters that force the form of the reply; empty
        if nothing is forced. `schema` is the JSON schema of a reply without calls, ""
        for none. If the model may call tools and there is a schema, the reply is either
        calls or follows the schema. Raises SessionError 400 if no grammar can be made
        of the tools."""
        if choice.mode in ("required", "named"):
            schema = ""
        elif not schema:
            return {}
        elif not tools or choice.mode == "none":
            return {"json_schema": schema}
        try:
            return {
                "ebnf": reply_grammar(self.tool_calls, tools, choice, parallel, schema)
            }
        except (
            RuntimeError,
            ValueError,
        ) as error:  # what xgrammar and SGLang raise for an unusable schema
            reason = f"these tools cannot be forced: {error}"
            raise SessionError(
                reason, status=400, code="invalid_value", param="tools"
            ) from None


def _unknown_parser(field: str, name: str, error: ValueError) -> ConfigError:
    fix = "take a name from `python -m sglang.launch_server --help`, auto, or none"
    return ConfigError(f"gateway.{field}", name, str(error), fix)
