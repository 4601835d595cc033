"""Blocks of a reply that may be tool calls, one type for each way of marking calls.

| type | marks | the block is | streamed | content, if there are calls |
|---|---|---|---|---|
| `DelimitedBlock` | beginning and end (Qwen, DeepSeek) | one call, or some | its calls | none |
| `OpenBlock` | only the beginning (Mistral, Llama) | the rest of the reply | nothing | as SGLang parses it |
| `UnmarkedBlock` | none (Pythonic) | the whole reply | its content | as SGLang parses it |

Every block has its own SGLang parser. A block without a call of a known tool is
entirely content.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from invrl.gateway.rendering.text_stream import partial_mark_length
from invrl.gateway.rendering.tool_calls.call_forms import CallForm
from invrl.gateway.types import CallDelta, Delta

if TYPE_CHECKING:
    from sglang.srt.function_call.core_types import ToolCallItem
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

_MAX_PARSED_PER_NEW_CHARACTER = 20
"""SGLang's parser rereads the whole block for every piece. A piece is therefore passed
to it only once it has at least one character for this many that were parsed before."""


@dataclass(slots=True)
class _Call:
    """A call of a block, as returned so far."""

    name: str
    arguments: str


class CallBlock(ABC):
    """A block of text that may be one or more calls. `first_index` is the number of the
    block's first call in the reply."""

    def __init__(
        self,
        form: CallForm,
        parser: FunctionCallParser,
        *,
        tool_names: frozenset[str],
        turn_id: str,
        first_index: int,
    ) -> None:
        self._form = form
        self._parser = parser
        self._tool_names = tool_names
        self._turn_id = turn_id
        self._first_index = first_index
        self._parsed = 0
        """Characters that were passed to the incremental parser."""
        self._tool_is_known = False
        """Whether the incremental parser is reading a call of one of the tools."""
        self._calls: list[_Call] = []

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @abstractmethod
    def stream(self, text: str, end: int | None) -> Delta:
        """Return what has become certain of the block that `text` begins with. `end` is
        where the block ends, None if that has not arrived."""

    @abstractmethod
    def close(self, text: str) -> Delta:
        """Return the part of the whole block that `stream` has not returned. Its
        content comes after its calls."""

    def _parse_piece(self, piece: str) -> tuple[str, Sequence[ToolCallItem]]:
        """Return the content and the pieces of calls that the incremental parser
        reads."""
        self._parsed += len(piece)
        return _parse(self._parser.parse_stream_chunk, piece)

    def _parse_whole(self, text: str) -> tuple[str, Sequence[ToolCallItem]]:
        """Return the content and the calls of the whole block."""
        return _parse(self._parser.parse_non_stream, text)

    def _read_items(self, items: Sequence[ToolCallItem]) -> tuple[CallDelta, ...]:
        """Return the pieces of calls that the incremental parser has read. A call's
        first piece has its name."""
        pieces = []
        for item in items:
            if item.name:
                self._tool_is_known = item.name in self._tool_names
            if not self._tool_is_known:
                continue
            if item.name:
                pieces.append(self._begin_call(item.name, item.parameters))
            elif self._calls:
                last = len(self._calls) - 1
                pieces.append(self._extend_call(last, item.parameters))
        return tuple(pieces)

    def _read_missing(self, items: Sequence[ToolCallItem]) -> tuple[CallDelta, ...]:
        """Return what was not returned yet of the calls of the whole block."""
        known_items = [item for item in items if item.name in self._tool_names]
        pieces = []
        for place, item in enumerate(known_items):
            pieces.append(self._missing_piece(place, item))
        return tuple(pieces)

    def _missing_piece(self, place: int, item: ToolCallItem) -> CallDelta:
        name = item.name or ""
        arguments = _without_lone_surrogates(item.parameters)
        if place >= len(self._calls):
            return self._begin_call(name, arguments)
        returned = self._calls[place]
        if returned.name != name or not arguments.startswith(returned.arguments):
            return self._extend_call(place, "")
        rest = arguments.removeprefix(returned.arguments)
        return self._extend_call(place, rest)

    def _begin_call(self, name: str, arguments: str) -> CallDelta:
        """Begin a call. Its id is made of the turn and the call's position, so that a
        retry gets the same one."""
        index = self._first_index + len(self._calls)
        arguments = _without_lone_surrogates(arguments)
        self._calls.append(_Call(name, arguments))
        place = f"{self._turn_id}.{index}".encode()
        digest = hashlib.blake2b(place, digest_size=12).hexdigest()
        return CallDelta(
            index=index,
            id=f"call_{digest}",
            name=name,
            arguments=arguments,
        )

    def _extend_call(self, place: int, arguments: str) -> CallDelta:
        arguments = _without_lone_surrogates(arguments)
        self._calls[place].arguments += arguments
        return CallDelta(index=self._first_index + place, arguments=arguments)


class DelimitedBlock(CallBlock):
    """A block with a mark at its end: its calls are returned while it arrives."""

    def stream(self, text: str, end: int | None) -> Delta:
        certain = end
        if certain is None:
            certain = len(text) - partial_mark_length(text, self._form.ends)
        piece = text[self._parsed : certain]
        if not piece:
            return Delta()
        is_too_short = len(piece) * _MAX_PARSED_PER_NEW_CHARACTER < self._parsed
        if is_too_short and end is None:
            return Delta()
        _, items = self._parse_piece(piece)
        return Delta(calls=self._read_items(items))

    def close(self, text: str) -> Delta:
        form = self._form
        parsed_text = text
        if not text.startswith(form.outer):
            parsed_text = form.outer + text
        _, items = self._parse_whole(parsed_text)
        if form.lenient and not text.endswith(form.ends):
            items = ()
        calls = self._read_missing(items)
        content = ""
        if not self._calls:
            content = text
        return Delta(content=content, calls=calls)


class OpenBlock(CallBlock):
    """A block that begins with a mark and ends with the reply: nothing of it is
    returned before."""

    def stream(self, text: str, end: int | None) -> Delta:
        return Delta()

    def close(self, text: str) -> Delta:
        content, items = self._parse_whole(text)
        calls = self._read_missing(items)
        if not self._calls:
            content = text
        return Delta(content=content, calls=calls)


class UnmarkedBlock(CallBlock):
    """A whole reply. While it arrives, SGLang's parser decides which part of it is
    content; that part was returned then, and cannot be corrected at the end."""

    _streamed_content = ""
    """Content that `stream` has returned so far."""

    def stream(self, text: str, end: int | None) -> Delta:
        piece = text[self._parsed :]
        if not piece:
            return Delta()
        content, _ = self._parse_piece(piece)
        self._streamed_content += content
        return Delta(content=content)

    def close(self, text: str) -> Delta:
        content, items = self._parse_whole(text)
        calls = self._read_missing(items)
        if not self._calls:
            content = text
        was_streamed = self._parsed > 0
        if was_streamed:
            content = self._rest(text)
        return Delta(content=content, calls=calls)

    def _rest(self, text: str) -> str:
        """Return the content that was not streamed: none if there are calls, otherwise
        the rest of the text."""
        if self._calls or not text.startswith(self._streamed_content):
            return ""
        return text.removeprefix(self._streamed_content)


def block_type(form: CallForm) -> type[CallBlock]:
    """Return the type of the blocks of a form."""
    if form.ends:
        return DelimitedBlock
    if form.begins:
        return OpenBlock
    return UnmarkedBlock


def _parse(
    parse: Callable[[str], tuple[str, list[ToolCallItem]]],
    text: str,
) -> tuple[str, Sequence[ToolCallItem]]:
    """Return content and calls. SGLang's parsers raise various exceptions for JSON that
    is no call or is nested too deeply; the text is then no call."""
    try:
        return parse(text)
    except Exception:
        return "", ()


def _without_lone_surrogates(arguments: str) -> str:
    """Replace what UTF-8 cannot encode: a model may sample half of a surrogate pair,
    and SGLang keeps it."""
    return arguments.encode(errors="replace").decode()
