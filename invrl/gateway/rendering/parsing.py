"""A reply's text taken apart: reasoning, content, tool calls; and the grammar that forces a call.

SGLang's own parsers do it, whole or as the text arrives. Importing them costs seconds and 500 MB (they
import torch), so that happens only where the chat template has tools or thinking."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec import structs
from pydantic import BaseModel

from invrl.errors import ConfigError, SessionError
from invrl.gateway.rendering.call_reader import CallReader, call_parser
from invrl.gateway.types import CallDelta, Delta, Message, Tool, ToolCall, ToolChoice
from invrl.types import Json

if TYPE_CHECKING:
    from sglang.srt.parser.reasoning_parser import ReasoningParser

_CALLS_BY_MARK = (
    ("<|python_tag|>", "llama3"),
    ("ipython", "llama3"),
    ("｜DSML｜", "deepseekv32"),
    ("<｜tool▁calls▁begin｜>", "deepseekv3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "qwen25"),
)
_REASONING_BY_MARK = (
    ("enable_thinking", "qwen3"),
    ("thinking is defined", "deepseek-v3"),
    ("</think>", "deepseek-r1"),
)


def detect_parsers(template: str) -> tuple[str, str]:
    """SGLang's names of the tool-call and the reasoning parser for a chat template; "" for none."""
    marks = _CALLS_BY_MARK if "tools" in template else ()
    calls = next((name for mark, name in marks if mark in template), "")
    if calls == "deepseekv3" and "```json" not in template:
        calls = "deepseekv31"
    reasoning = next((name for mark, name in _REASONING_BY_MARK if mark in template), "")
    return calls, reasoning


def choose_parsers(tool_calls: str, reasoning: str, *, template: str) -> Parsers:
    """By the settings' names: SGLang's, "auto" (by the chat template) or "none"."""
    calls, thoughts = (
        {"auto": found, "none": ""}.get(name, name)
        for name, found in zip((tool_calls, reasoning), detect_parsers(template), strict=True)
    )
    return Parsers(tool_calls=calls, reasoning=thoughts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsers:
    """The parsers of the served model, by SGLang's names. Empty: replies are content alone."""

    tool_calls: str = ""
    reasoning: str = ""

    def preload(self) -> None:
        """Import what `reply` needs, before the first request waits for it. ConfigError for a name that
        SGLang does not know."""
        field, name = "tool_call_parser", self.tool_calls
        try:
            if name:
                call_parser(name, ())
            field, name = "reasoning_parser", self.reasoning
            if name:
                _reasoning_parser(name, thinks=False)
        except ValueError as error:
            fix = "take a name from `python -m sglang.launch_server --help`, auto, or none"
            raise ConfigError(f"gateway.{field}", name, str(error), fix) from None

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
        """For the reply of a turn to the prompt that ends like `prompt_text`."""
        if not (self.reasoning or (self.tool_calls and tools)):
            return ReplyParser()
        calls, most = None, None if parallel else 1
        if tools and choice.mode != "none":
            tools = [tool for tool in tools if not choice.allowed or tool.name in choice.allowed]
            calls = CallReader(self.tool_calls, tools, turn_id=turn_id, most_calls=most, stream=stream)
        thinks = prompt_text.rstrip().endswith("<think>")
        reasoning = _reasoning_parser(self.reasoning, thinks=thinks) if self.reasoning else None
        return ReplyParser(reasoning, calls, stream=stream)

    def constraint(
        self, tools: tuple[Tool, ...], choice: ToolChoice, *, parallel: bool, schema: str = ""
    ) -> Mapping[str, Json]:
        """SGLang's sampling parameters that force the reply's form; empty where the model chooses. `schema`:
        what a reply without calls must follow, "" for none. With tools that may be called the reply is
        either calls or what the schema says. SessionError 400 if the tools cannot be made a grammar."""
        if choice.mode in ("required", "named"):
            schema = ""
        elif not schema:
            return {}
        elif not tools or choice.mode == "none":
            return {"json_schema": schema}
        try:
            return {"ebnf": _reply_grammar(self.tool_calls, tools, choice, parallel, schema)}
        except (RuntimeError, ValueError) as error:  # xgrammar's and SGLang's words for a schema of no use
            reason = f"these tools cannot be forced: {error}"
            raise SessionError(reason, status=400, code="invalid_value", param="tools") from None


class ReplyParser:
    """One reply. `push` its text as it arrives, then `finish`; without `stream` all comes from `finish`."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        calls: CallReader | None = None,
        *,
        stream: bool = True,
    ) -> None:
        self._reasoning, self._calls, self._stream = reasoning, calls, stream
        self._text = ""
        self._beginning = ""
        """All that came before the first content, where there may be thinking."""
        self._said = False
        """Some content was told."""
        self._thought = False
        """Some reasoning was told, or the end of empty thinking was seen."""

    @property
    def special(self) -> bool:
        """Tool calls may be marked by special tokens: the text must show them."""
        return self._calls is not None

    def push(self, text: str) -> Delta:
        """What `text` adds, as far as it can be told yet."""
        if self._reasoning is None and self._calls is None:
            return self._add(Delta(content=text))
        if not self._stream:
            self._text += text
            return Delta()
        return self._add(self._told(*self._apart("parse_stream_chunk", text))) if text else Delta()

    def finish(self) -> tuple[Delta, ...]:
        """The rest, once the text is whole."""
        if self._stream:
            rest = self._apart("parse_stream_end") if self._reasoning else ("", "")
        else:
            rest = self._apart("parse_non_stream", self._text)
        deltas = [self._told(*rest), *(self._calls.finish() if self._calls else ())]
        return tuple(self._add(delta) for delta in deltas if delta)

    def _apart(self, method: str, *text: str) -> tuple[str, str]:
        """Reasoning and the rest, as the method of SGLang's parser tells them."""
        if self._reasoning is None:
            return "", "".join(text)
        if not self._said and not self._thought:
            self._beginning += "".join(text)
            self._thought = self._reasoning.detector.think_end_token in self._beginning
        thought, normal = getattr(self._reasoning, method)(*text)
        return thought or "", normal or ""

    def _told(self, reasoning: str, text: str) -> Delta:
        delta = self._calls.push(text) if self._calls else Delta(content=text)
        return structs.replace(delta, reasoning=reasoning)

    def _add(self, delta: Delta) -> Delta:
        """Newlines around the thinking's marks are the template's, not the reply's."""
        if not self._thought and delta.reasoning.startswith("\n"):
            delta = structs.replace(delta, reasoning=delta.reasoning.lstrip("\n"))
        if (delta.reasoning or self._thought) and not self._said and delta.content.startswith("\n"):
            delta = structs.replace(delta, content=delta.content.lstrip("\n"))
        self._said, self._thought = self._said or bool(delta.content), self._thought or bool(delta.reasoning)
        return delta


def joined(deltas: Sequence[Delta]) -> Delta:
    """What they add one after the other. A call's pieces become one."""
    calls: dict[int, list[CallDelta]] = {}
    for call in (call for delta in deltas for call in delta.calls):
        calls.setdefault(call.index, []).append(call)
    return Delta(
        content="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        calls=tuple(structs.replace(c[0], arguments="".join(p.arguments for p in c)) for c in calls.values()),
    )


def reply(told: Delta) -> Message:
    """The message of all that was told."""
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in told.calls)
    return Message("assistant", told.content, told.reasoning, calls)


def _callable(tools: Sequence[Tool], choice: ToolChoice) -> tuple[Tool, ...]:
    """The tools that a grammar of calls has."""
    names = (choice.name,) if choice.mode == "named" else choice.allowed
    return tuple(tool for tool in tools if not names or tool.name in names)


@functools.lru_cache(maxsize=256)
def _reply_grammar(
    parser_name: str, tools: tuple[Tool, ...], choice: ToolChoice, parallel: bool, schema: str
) -> str:
    """The grammar of a reply that calls, or, with a `schema`, follows that, as EBNF: of the ways to say it,
    the one that sglang-router 0.3.2 passes on (it drops structural tags)."""
    from xgrammar import Grammar

    calls = Grammar.from_structural_tag(_call_tag(parser_name, tools, choice, parallel))
    return str(Grammar.union(calls, Grammar.from_json_schema(schema)) if schema else calls)


def _call_tag(
    parser_name: str, tools: tuple[Tool, ...], choice: ToolChoice, parallel: bool
) -> dict[str, Json]:
    """XGrammar's structural tag of a reply that is calls."""
    from sglang.srt.entrypoints.openai.protocol import ToolChoice as SglangChoice

    tools = _callable(tools, choice)
    tools = tuple(replace(tool, strict=True) for tool in tools)  # forced calls keep to their schemas
    named = SglangChoice.model_validate({"function": {"name": choice.name}})
    parser = call_parser(parser_name, tools)
    found = parser.get_structure_constraint(
        named if choice.mode == "named" else "required", parallel_tool_calls=parallel
    )
    if found is None:
        raise ValueError("their schemas make no grammar")
    kind, value = found
    if isinstance(value, BaseModel):
        value = value.model_dump(by_alias=True)
    if kind != "structural_tag":  # a forced call would look otherwise than a free one, and parse otherwise
        raise ValueError(f"the parser {parser_name} has no grammar of its calls")
    tag = json.loads(value) if isinstance(value, str) else value
    if "structures" in tag:  # SGLang's older form
        for each in tag["structures"]:
            each["content"] = {"type": "json_schema", "json_schema": each.pop("schema")}
        tags = [{"type": "tag", **each} for each in tag["structures"]]
        calls = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
        calls |= {"at_least_one": True, "stop_after_first": not parallel}
        tag = {"type": "structural_tag", "format": calls}
    return tag


def _reasoning_parser(name: str, *, thinks: bool) -> ReasoningParser:
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    return ReasoningParser(name, stream_reasoning=True, force_reasoning=thinks)
