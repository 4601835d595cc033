"""Parses the text of a reply into reasoning, content and tool calls, whole or as it
arrives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from invrl.gateway.rendering.thinking import THINK
from invrl.gateway.rendering.tool_calls.call_reader import CallReader
from invrl.gateway.types import CallDelta, Delta, Message, ToolCall

if TYPE_CHECKING:
    from sglang.srt.parser.reasoning_parser import ReasoningParser


class ReplyParser:
    """Parses one reply: call `push` with its text as it arrives, then `finish`. Without
    `stream`, `finish` returns everything. Without a reasoning parser and a call reader,
    all of the text is content."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        calls: CallReader | None = None,
        *,
        stream: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._stream = stream
        self._text = ""
        """Text so far, if nothing is returned before the end."""
        self._opening = ""
        """Text so far, while it may still become the mark that begins thinking."""
        self._is_open = reasoning is None or not _may_begin_thinking(reasoning)
        """Whether the beginning of the reply has been checked."""
        self._beginning = ""
        """Text before the first content, kept while the reply may still be thinking."""
        self._has_reasoning = False
        """Whether some reasoning was returned."""
        self._has_content = False
        """Whether some content was returned."""
        self._has_thought = False
        """Whether some reasoning was returned, or the end of empty thinking was
        seen."""

    @property
    def special(self) -> bool:
        """Whether the text must include special tokens, because they may mark tool
        calls."""
        return self._calls is not None

    def push(self, text: str) -> Delta:
        """Return what `text` adds to the reply, as far as it is certain."""
        if self._reasoning is None and self._calls is None:
            return self._without_template_newlines(Delta(content=text))
        if not self._stream:
            self._text += text
            return Delta()
        text = self._after_opening(text)
        if not text:
            return Delta()
        reasoning, rest = self._split_reasoning("parse_stream_chunk", text)
        return self._without_template_newlines(self._parsed(reasoning, rest))

    def finish(self) -> tuple[Delta, ...]:
        """Return the rest of the reply, once the text is complete."""
        deltas = []
        if self._stream:
            opening = self._after_opening("", is_last=True)
            if opening:
                deltas.append(
                    self._parsed(*self._split_reasoning("parse_stream_chunk", opening))
                )
            reasoning, rest = self._split_reasoning("parse_stream_end")
        else:
            text = self._after_opening(self._text, is_last=True)
            reasoning, rest = self._split_reasoning("parse_non_stream", text)
        deltas.append(self._parsed(reasoning, rest))
        if self._calls is not None:
            deltas.extend(self._calls.finish())
        shown = [self._without_template_newlines(delta) for delta in deltas if delta]
        return tuple(shown)

    def _after_opening(self, text: str, *, is_last: bool = False) -> str:
        """Return the text that may be parsed now. A reply thinks only if it begins with
        the mark of thinking, before which some models write a newline. Without the
        mark, all of the reply is content."""
        if self._is_open or self._reasoning is None:
            return text
        self._opening += text
        mark = self._reasoning.detector.think_start_token
        visible = self._opening.lstrip()
        if visible.startswith(mark):
            opening = visible
        elif mark.startswith(visible) and not is_last:
            return ""
        else:
            opening = self._opening
            self._reasoning = None
        self._opening = ""
        self._is_open = True
        return opening

    def _split_reasoning(self, method: str, *text: str) -> tuple[str, str]:
        """Return the reasoning and the rest, from this method of SGLang's parser."""
        if self._reasoning is None:
            return "", "".join(text)
        if not self._has_content and not self._has_thought:
            self._beginning += "".join(text)
            self._has_thought = (
                self._reasoning.detector.think_end_token in self._beginning
            )
        reasoning, rest = getattr(self._reasoning, method)(*text)
        return reasoning or "", rest or ""

    def _parsed(self, reasoning: str, text: str) -> Delta:
        if self._calls is None:
            return Delta(reasoning=reasoning, content=text)
        return structs.replace(self._calls.push(text), reasoning=reasoning)

    def _without_template_newlines(self, delta: Delta) -> Delta:
        """Remove the newlines around the marks of thinking: they are the template's,
        not the reply's."""
        reasoning = delta.reasoning
        content = delta.content
        if not self._has_reasoning:
            reasoning = reasoning.lstrip("\n")
        if reasoning:
            self._has_reasoning = True
            self._has_thought = True
        if self._has_thought and not self._has_content:
            content = content.lstrip("\n")
        if content:
            self._has_content = True
        return structs.replace(delta, reasoning=reasoning, content=content)


def _may_begin_thinking(reasoning: ReasoningParser) -> bool:
    """Whether the reply itself writes the mark that begins thinking, at its
    beginning."""
    detector = reasoning.detector
    return detector.think_start_token == THINK and not detector.force_reasoning


def reasoning_parser(name: str, *, in_thinking: bool) -> ReasoningParser:
    """Return SGLang's parser of that name. Raises ValueError if there is none.
    `in_thinking`: the prompt has already opened the thinking."""
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    return ReasoningParser(name, stream_reasoning=True, force_reasoning=in_thinking)


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Concatenate deltas. The pieces of each call become one."""
    pieces_of_calls: dict[int, list[CallDelta]] = {}
    for delta in deltas:
        for piece in delta.calls:
            pieces_of_calls.setdefault(piece.index, []).append(piece)
    calls = []
    for pieces in pieces_of_calls.values():
        arguments = "".join(piece.arguments for piece in pieces)
        calls.append(structs.replace(pieces[0], arguments=arguments))
    return Delta(
        content="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        calls=tuple(calls),
    )


def reply_message(delta: Delta) -> Message:
    """Return the message of a whole reply."""
    calls = [ToolCall(call.id, call.name, call.arguments) for call in delta.calls]
    return Message(
        "assistant",
        content=delta.content,
        reasoning=delta.reasoning,
        tool_calls=tuple(calls),
    )
