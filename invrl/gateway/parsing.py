"""A reply's text taken apart: reasoning, content, tool calls; and the grammar that forces a call.

SGLang's own parsers do it, whole or as the text arrives. Importing them costs seconds and 500 MB (they
import torch), so that happens only where the chat template has tools or thinking. Invariant: what is no
call of a known tool is content. A call that was cut short is content too, unless a stream has begun to tell
it: then it ends where it was. Made by the gateway's process, used by
`turns.py` and `generation.py`."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs
from pydantic import BaseModel

from invrl.errors import ConfigError, SessionError
from invrl.gateway.message import Message, Tool, ToolCall, ToolChoice
from invrl.types import Json

if TYPE_CHECKING:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
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
_LATE = ("DeepSeekV3",)
"""SGLang's parsers that lose a call when two arrive in one piece: their calls are told at the end."""
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


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a piece adds to the reply's call number `index`. `id` and `name` come with its first piece."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What a piece of text adds to the reply."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


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
                _call_parser(name, ())
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
        calls = _call_parser(self.tool_calls, tools) if tools and choice.mode != "none" else None
        thinks = prompt_text.rstrip().endswith("<think>")
        reasoning = _reasoning_parser(self.reasoning, thinks=thinks) if self.reasoning else None
        return ReplyParser(
            reasoning, calls, turn_id=turn_id, most_calls=None if parallel else 1, stream=stream
        )

    def constraint(
        self, tools: tuple[Tool, ...], choice: ToolChoice, *, parallel: bool
    ) -> Mapping[str, Json]:
        """SGLang's sampling parameters that force a call; empty where the model chooses. SessionError 400
        if the tools cannot be made a grammar."""
        if choice.mode not in ("required", "named"):
            return {}
        try:
            return {"ebnf": _forced_call(self.tool_calls, tools, choice, parallel)}
        except (RuntimeError, ValueError) as error:  # xgrammar's and SGLang's words for a schema of no use
            reason = f"these tools cannot be forced: {error}"
            raise SessionError(reason, status=400, code="invalid_value", param="tools") from None


class ReplyParser:
    """One reply. `push` its text as it arrives, then `finish`; without `stream` all comes from `finish`."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        calls: FunctionCallParser | None = None,
        *,
        turn_id: str = "",
        most_calls: int | None = None,
        stream: bool = True,
    ) -> None:
        self._reasoning, self._parser, self._most_calls = reasoning, calls, most_calls
        self._turn_id, self._stream = turn_id, stream
        self._late = calls is not None and type(calls.detector).__name__.startswith(_LATE)
        self._plain = reasoning is None and calls is None
        self._text = ""
        self._to_calls = ""
        """What was handed to the call parser."""
        self._told = 0
        """How much of that was told as content."""
        self._content = self._thought = ""
        self._calls: list[ToolCall] = []
        self._begun = 0
        """Calls of the text so far; those over the limit are not told."""

    @property
    def special(self) -> bool:
        """Tool calls may be marked by special tokens: the text must show them."""
        return self._parser is not None

    def push(self, text: str) -> Delta:
        """What `text` adds, as far as it can be told yet."""
        if self._plain:
            return self._add(Delta(content=text))
        self._text += text
        if not self._stream or not text:
            return Delta()
        reasoning, rest = self._apart("parse_stream_chunk", text)
        return self._add(self._parse_calls(rest, reasoning))

    def finish(self) -> Delta:
        """The rest, once the text is whole."""
        if self._plain:
            return Delta()
        if not self._stream:
            return self._add(self._whole())
        reasoning, rest = self._apart("parse_stream_end")
        deltas = [self._add(self._parse_calls(rest, reasoning))]
        if self._parser is not None:
            _, items = ("", []) if self._late else self._parser.parse_stream_end()
            deltas.append(self._add(Delta(calls=self._deltas(items))))
            deltas.append(self._add(self._missing()))
        return Delta(
            content="".join(each.content for each in deltas),
            reasoning="".join(each.reasoning for each in deltas),
            calls=tuple(call for each in deltas for call in each.calls),
        )

    @property
    def message(self) -> Message:
        """All that was told so far."""
        return Message("assistant", self._content, self._thought, tuple(self._calls))

    def _apart(self, method: str, *text: str) -> tuple[str, str]:
        """Reasoning and the rest, as the method of SGLang's parser tells them."""
        if self._reasoning is None:
            return "", "".join(text)
        thought, normal = getattr(self._reasoning, method)(*text)
        return thought or "", normal or ""

    def _parse_calls(self, text: str, reasoning: str) -> Delta:
        if self._parser is None:
            return Delta(content=text, reasoning=reasoning)
        if not text:
            return Delta(reasoning=reasoning)
        self._to_calls += text
        content, items = ("", []) if self._late else self._parser.parse_stream_chunk(text)
        if mark := self._parser.detector.bot_token:
            content = self._before(mark)
        else:
            self._told = len(self._to_calls)
        return Delta(content=content, reasoning=reasoning, calls=self._deltas(items))

    def _before(self, mark: str) -> str:
        """Content not yet told: up to where a call begins, or might begin. What SGLang's incremental
        parser takes for content after that is a piece of a call it could not read."""
        assert self._parser is not None
        text, start = self._to_calls, self._told
        at = text.find(mark)
        if at < 0 and self._parser.detector.has_tool_call(text):  # a call in the parser's other form
            at = start
        elif at < 0:
            at = len(text) - max((n for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
        self._told = max(at, start)
        return text[start : self._told]

    def _missing(self) -> Delta:
        """What the incremental parser kept back, by the whole text: the end of a call's arguments, whole
        calls, or text that was taken for a call and is none."""
        assert self._parser is not None
        whole, items = self._parser.parse_non_stream(self._to_calls)
        missing: list[CallDelta] = []
        for index, item in enumerate(items):
            if index >= len(self._calls):
                missing.append(self._first(index, item.name or "", item.parameters))
            elif (arguments := _sayable(item.parameters)).startswith(known := self._calls[index].arguments):
                missing.append(CallDelta(index=index, arguments=arguments[len(known) :]))
        told = self._to_calls[: self._told]
        content = whole.removeprefix(told.strip()) if items and whole.startswith(told.strip()) else ""
        if told[-1:].isspace():
            content = content.lstrip()
        if not (items or self._calls):
            content = self._to_calls[self._told :]
        return Delta(content=content, calls=self._limited(missing))

    def _whole(self) -> Delta:
        reasoning, text = self._apart("parse_non_stream", self._text)
        if self._parser is None:
            return Delta(content=text, reasoning=reasoning)
        content, items = self._parser.parse_non_stream(text)
        if not items:
            content = text
        calls = [self._first(index, item.name or "", item.parameters) for index, item in enumerate(items)]
        return Delta(content=content, reasoning=reasoning, calls=self._limited(calls))

    def _deltas(self, items: Sequence[Any]) -> tuple[CallDelta, ...]:
        """SGLang's items: the first of a call has its name, the index is the call's place."""
        found: list[CallDelta] = []
        for item in items:
            if item.name:
                found.append(self._first(self._begun, item.name, item.parameters))
                self._begun += 1
            elif self._begun and item.parameters:
                found.append(CallDelta(index=self._begun - 1, arguments=item.parameters))
        return self._limited(found)

    def _first(self, index: int, name: str, arguments: str) -> CallDelta:
        """Ids are the turn's and the place's: a turn that is told again has the same."""
        made = hashlib.blake2b(f"{self._turn_id}.{index}".encode(), digest_size=12).hexdigest()
        return CallDelta(index=index, id=f"call_{made}", name=name, arguments=arguments)

    def _limited(self, calls: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
        most = self._most_calls
        told = [c for c in calls if (c.name or c.arguments) and (most is None or c.index < most)]
        return tuple(structs.replace(each, arguments=_sayable(each.arguments)) for each in told)

    def _add(self, delta: Delta) -> Delta:
        """Newlines around the thinking's marks are the template's, not the reply's."""
        if not self._thought and delta.reasoning.startswith("\n"):
            delta = structs.replace(delta, reasoning=delta.reasoning.lstrip("\n"))
        if (delta.reasoning or self._thought) and not self._content and delta.content.startswith("\n"):
            delta = structs.replace(delta, content=delta.content.lstrip("\n"))
        self._content += delta.content
        self._thought += delta.reasoning
        for call in delta.calls:
            if call.index == len(self._calls):
                self._calls.append(ToolCall(call.id, call.name, call.arguments))
            else:
                told = self._calls[call.index]
                self._calls[call.index] = replace(told, arguments=told.arguments + call.arguments)
        return delta


@functools.lru_cache(maxsize=256)
def _forced_call(parser_name: str, tools: tuple[Tool, ...], choice: ToolChoice, parallel: bool) -> str:
    """The grammar of a reply that calls, as EBNF: of the ways to say it, the one that sglang-router 0.3.2
    passes on (it drops structural tags)."""
    from sglang.srt.entrypoints.openai.protocol import ToolChoice as SglangChoice
    from xgrammar import Grammar

    if choice.mode == "named":
        tools = tuple(tool for tool in tools if tool.name == choice.name)
    tools = tuple(replace(tool, strict=True) for tool in tools)  # forced calls keep to their schemas
    named = SglangChoice.model_validate({"function": {"name": choice.name}})
    parser = _call_parser(parser_name, tools)
    found = parser.get_structure_constraint(
        "required" if choice.mode == "required" else named, parallel_tool_calls=parallel
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
    return str(Grammar.from_structural_tag(tag))


def _sayable(arguments: str) -> str:
    """Without what UTF-8 cannot say: SGLang writes halves of surrogate pairs, which a model may sample."""
    return arguments.encode(errors="replace").decode()


def _call_parser(name: str, tools: Sequence[Tool]) -> FunctionCallParser:
    from sglang.srt.entrypoints.openai.protocol import Tool as SglangTool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    functions = [{**asdict(tool), "parameters": json.loads(tool.parameters or "null")} for tool in tools]
    shown = [SglangTool.model_validate({"type": "function", "function": each}) for each in functions]
    return FunctionCallParser(shown, name)


def _reasoning_parser(name: str, *, thinks: bool) -> ReasoningParser:
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    return ReasoningParser(name, stream_reasoning=True, force_reasoning=thinks)
