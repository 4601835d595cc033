"""Reads tool calls out of the text of a reply, whole or as it arrives, in the order of the text.

The text is cut into content and blocks that may be a call. Every block gets an SGLang parser of its own: a
parser that fails on one block neither loses the text behind it nor takes the arguments of the next call for
its own. Invariant: nothing is lost. A block that is not a call of a known tool is returned as content. So is
a call that was cut short, unless its beginning was streamed already: then the call ends where it was cut.

A call is streamed while it arrives only if its family of models marks the end of a call. The calls of other
families (Llama's, Mistral's) are returned once the reply has ended, because behind a call of an unknown tool
SGLang's incremental parsers return some calls twice and invent others. From the list of calls that it parses
at the end, SGLang drops those of unknown tools. If a family has no marks at all (Pythonic), SGLang's parser
decides which part of a stream is content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from invrl.gateway.rendering.call_forms import CALL_FORMS, CallForm
from invrl.gateway.rendering.call_parser import call_parser
from invrl.gateway.rendering.text_stream import partial_mark_length
from invrl.gateway.types import CallDelta, Delta, Tool

if TYPE_CHECKING:
    from sglang.srt.function_call.core_types import ToolCallItem
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

_MAX_PARSED_PER_NEW_CHARACTER = 20
"""SGLang's parser reads the whole block again for every piece. A piece is therefore passed to it only once it
has at least one character for so many that were parsed before."""


class CallReader:
    """Reads one reply: call `push` with its text as it arrives, then `finish`. Without `stream`, `finish`
    returns everything. Calls after the first `max_calls` are dropped."""

    def __init__(
        self, name: str, tools: Sequence[Tool], *, turn_id: str, max_calls: int | None, stream: bool
    ) -> None:
        self._parser_name = name
        self._tools = tools
        self._tool_names = frozenset(tool.name for tool in tools)
        self._turn_id = turn_id
        self._max_calls = max_calls
        self._stream = stream
        self._detector = call_parser(name, tools).detector
        form = CALL_FORMS.get(type(self._detector).__name__)
        self._form_is_known = form is not None
        if form is None:
            mark = self._detector.bot_token
            form = CallForm(begins=(mark,) if mark else ())
        self._form = form
        self._text = ""
        """Text that was not returned yet: it may become a block, or it begins with the current block."""
        self._space = ""
        """Whitespace behind a call. It is content only if more content follows."""
        self._content = ""
        """All content so far, kept for forms without end marks."""
        self._num_calls = 0
        """The number of calls in the blocks that have ended."""
        self._after_call = False
        """The block before was a call."""
        self._block: _Block | None = None
        """The block that `_text` begins with."""
        self._deltas: list[Delta] = []
        """What was read but not returned yet."""

    def push(self, text: str) -> Delta:
        """What `text` adds to the reply, as far as it is certain."""
        self._text += text
        if not self._stream:
            return Delta()
        self._deltas.extend(self._read_text(is_last=False))
        return self._next_delta()

    def finish(self) -> tuple[Delta, ...]:
        """The rest of the reply, once the text is complete."""
        self._deltas.extend(self._read_text(is_last=True))
        if not self._stream:
            return (self._whole_reply(),)
        rest = []
        while self._deltas:
            rest.append(self._next_delta())
        return tuple(rest)

    def _whole_reply(self) -> Delta:
        content = "".join(delta.content for delta in self._deltas)
        if self._num_calls:
            content = content.strip()
        calls = tuple(call for delta in self._deltas for call in delta.calls)
        return Delta(content=content, calls=calls)

    def _next_delta(self) -> Delta:
        """As much as fits into one delta, in which content comes before calls. Content behind a call is left
        for the next delta."""
        content = ""
        calls: tuple[CallDelta, ...] = ()
        while self._deltas:
            if calls and self._deltas[0].content:
                break
            delta = self._deltas.pop(0)
            content += delta.content
            calls += delta.calls
        return Delta(content=content, calls=calls)

    def _read_text(self, *, is_last: bool) -> Iterator[Delta]:
        """Reads the text as far as it is certain. `is_last`: no more text will come."""
        while self._text:
            if self._block is None:
                begin = self._find_block()
                if begin is None:
                    held_back = 0
                    if not is_last:
                        held_back = partial_mark_length(self._text, self._form.begins)
                    yield self._content_delta(self._take(len(self._text) - held_back))
                    return
                yield self._content_delta(self._take(begin))
                parser = call_parser(self._parser_name, self._tools)
                self._block = _Block(parser, self._tool_names, self._turn_id, first_index=self._num_calls)
            end = self._find_end_of_block()
            if end is None and is_last:
                end = len(self._text)
            if self._stream:
                yield from self._stream_block(self._block, end)
            if end is None:
                return
            yield from self._close_block(self._block, end)

    def _find_block(self) -> int | None:
        """Where the next block begins; None if no block has begun."""
        if not self._form.begins:
            return 0
        positions = [self._text.find(mark) for mark in self._form.begins]
        positions = [position for position in positions if position >= 0]
        if positions:
            return min(positions)
        if not self._form_is_known and self._detector.has_tool_call(self._content + self._text):
            return 0  # a call in another form of this family, without the mark
        return None

    def _find_end_of_block(self) -> int | None:
        """Where the block that the text begins with ends, mark included; None if the mark has not come."""
        begin_mark = next((mark for mark in self._form.begins if self._text.startswith(mark)), "")
        start = len(begin_mark)
        if begin_mark in self._form.ends:
            start = 0
        ends = []
        for mark in self._form.ends:
            position = self._text.find(mark, start)
            if position >= 0:
                ends.append(position + len(mark))
        return min(ends, default=None)

    def _stream_block(self, block: _Block, end: int | None) -> Iterator[Delta]:
        """Passes what has arrived of the block to its incremental parser."""
        has_begins = bool(self._form.begins)
        has_ends = bool(self._form.ends)
        if has_begins and not has_ends:
            return
        certain = end
        if certain is None:
            certain = len(self._text) - partial_mark_length(self._text, self._form.ends)
        piece = self._text[block.parsed : certain]
        if not piece:
            return
        is_too_short = len(piece) * _MAX_PARSED_PER_NEW_CHARACTER < block.parsed
        if is_too_short and has_begins and end is None:
            return
        content, items = block.parse_piece(piece)
        if not has_begins:
            yield self._content_delta(content)
        if has_ends:
            yield self._calls_delta(block.read_items(items))

    def _close_block(self, block: _Block, end: int) -> Iterator[Delta]:
        """Parses the whole block, and returns what its incremental parser has not returned; the block itself
        as content if it is no call."""
        form = self._form
        text = self._take(end)
        self._block = None
        # SGLang's parser has decided already which part of such a stream is content.
        content_was_streamed = self._stream and not form.begins
        parsed_text = text if text.startswith(form.outer) else form.outer + text
        content, items = block.parse_whole(parsed_text)
        if form.lenient and not text.endswith(form.ends):
            items = ()
        yield self._calls_delta(block.read_missing(items))
        if block.calls:
            self._num_calls += len(block.calls)
            self._after_call = True
            if not form.ends and not content_was_streamed:
                yield self._content_delta(content)
            return
        closes_calls = self._after_call and text == form.closing
        self._after_call = False
        if closes_calls:
            return
        if not content_was_streamed:
            yield self._content_delta(text)
        elif text.startswith(self._content):
            yield self._content_delta(text.removeprefix(self._content))

    def _take(self, length: int) -> str:
        taken = self._text[:length]
        self._text = self._text[length:]
        return taken

    def _content_delta(self, text: str) -> Delta:
        """`text` as content. Whitespace behind a call is held back until more content follows."""
        text = self._space + text
        self._space = ""
        if self._num_calls and text.isspace():
            self._space = text
            text = ""
        if not self._form.ends:
            self._content += text
        return Delta(content=text)

    def _calls_delta(self, calls: Iterable[CallDelta]) -> Delta:
        """The calls that add something, as far as `max_calls` permits."""
        shown = [call for call in calls if call.name or call.arguments]
        if self._max_calls is not None:
            shown = [call for call in shown if call.index < self._max_calls]
        return Delta(calls=tuple(shown))


@dataclass(slots=True)
class _Call:
    """A call of a block, as far as it was returned."""

    name: str
    arguments: str


class _Block:
    """A block of text that may be a call, or several, with a parser of its own. `first_index` is the number
    of the block's first call in the reply."""

    def __init__(
        self, parser: FunctionCallParser, tool_names: frozenset[str], turn_id: str, *, first_index: int
    ) -> None:
        self._parser = parser
        self._tool_names = tool_names
        self._turn_id = turn_id
        self._first_index = first_index
        self._tool_is_known = False
        """The incremental parser is reading a call of one of the tools."""
        self.parsed = 0
        """Characters that were passed to the incremental parser."""
        self.calls: list[_Call] = []

    def parse_piece(self, piece: str) -> tuple[str, Sequence[ToolCallItem]]:
        """The content and the pieces of calls that the incremental parser reads."""
        self.parsed += len(piece)
        return _parse(self._parser.parse_stream_chunk, piece)

    def parse_whole(self, text: str) -> tuple[str, Sequence[ToolCallItem]]:
        """The content and the calls of the whole block."""
        return _parse(self._parser.parse_non_stream, text)

    def read_items(self, items: Sequence[ToolCallItem]) -> list[CallDelta]:
        """The pieces of calls that the incremental parser has read. A call's first piece has its name."""
        pieces = []
        for item in items:
            if item.name:
                self._tool_is_known = item.name in self._tool_names
            if not self._tool_is_known:
                continue
            if item.name:
                pieces.append(self._begin_call(item.name, item.parameters))
            elif self.calls:
                pieces.append(self._extend_call(len(self.calls) - 1, item.parameters))
        return pieces

    def read_missing(self, items: Sequence[ToolCallItem]) -> list[CallDelta]:
        """What was not returned yet of the calls of the whole block."""
        known_items = [item for item in items if item.name in self._tool_names]
        return [self._missing_piece(place, item) for place, item in enumerate(known_items)]

    def _missing_piece(self, place: int, item: ToolCallItem) -> CallDelta:
        name = item.name or ""
        arguments = _without_lone_surrogates(item.parameters)
        if place >= len(self.calls):
            return self._begin_call(name, arguments)
        returned = self.calls[place]
        if returned.name != name or not arguments.startswith(returned.arguments):
            return self._extend_call(place, "")
        return self._extend_call(place, arguments.removeprefix(returned.arguments))

    def _begin_call(self, name: str, arguments: str) -> CallDelta:
        """The call's id is made of the turn and the call's place, so that a retry gets the same one."""
        index = self._first_index + len(self.calls)
        arguments = _without_lone_surrogates(arguments)
        self.calls.append(_Call(name, arguments))
        digest = hashlib.blake2b(f"{self._turn_id}.{index}".encode(), digest_size=12).hexdigest()
        return CallDelta(index=index, id=f"call_{digest}", name=name, arguments=arguments)

    def _extend_call(self, place: int, arguments: str) -> CallDelta:
        arguments = _without_lone_surrogates(arguments)
        self.calls[place].arguments += arguments
        return CallDelta(index=self._first_index + place, arguments=arguments)


def _parse(
    parse: Callable[[str], tuple[str, list[ToolCallItem]]], text: str
) -> tuple[str, Sequence[ToolCallItem]]:
    """Content and calls. SGLang's parsers raise various exceptions for JSON that is no call or is nested too
    deeply; the text is then no call."""
    try:
        return parse(text)
    except Exception:
        return "", ()


def _without_lone_surrogates(arguments: str) -> str:
    """Replaces what UTF-8 cannot encode: a model may sample half of a surrogate pair, and SGLang keeps it."""
    return arguments.encode(errors="replace").decode()
