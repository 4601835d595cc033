"""Reads tool calls out of the text of a reply, whole or as it arrives, in the order of
the text.

The text is cut into content and blocks that may be a call. Every block gets its own
SGLang parser: a parser that fails on one block neither loses the text after it nor
takes the arguments of the next call for its own. Invariant: nothing is lost. A block
that is not a call of a known tool is returned as content, as is a call that was cut
short, unless its beginning was streamed already: then the call ends where it was cut.

A call is streamed while it arrives only if its family of models marks the end of a
call. The calls of other families (Llama's, Mistral's) are returned once the reply has
ended, because after a call of an unknown tool SGLang's incremental parsers return some
calls twice and invent others. From the list of calls that it parses at the end, SGLang
drops those of unknown tools. If a family has no marks at all (Pythonic), SGLang's
parser decides which part of a stream is content. The types of blocks are in
`call_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from invrl.gateway.rendering.text_stream import partial_mark_length
from invrl.gateway.rendering.tool_calls.call_blocks import CallBlock, block_type
from invrl.gateway.rendering.tool_calls.call_forms import CALL_FORMS, CallForm
from invrl.gateway.rendering.tool_calls.call_parser import call_parser
from invrl.gateway.types import CallDelta, Delta, Tool


class CallReader:
    """Reads one reply: call `push` with its text as it arrives, then `finish`. Without
    `stream`, `finish` returns everything. Calls after the first `max_calls` are
    dropped."""

    def __init__(
        self,
        name: str,
        tools: Sequence[Tool],
        *,
        turn_id: str,
        max_calls: int | None,
        stream: bool,
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
            form = _mark_form(self._detector.bot_token)
        self._form = form
        self._text = ""
        """Text not returned yet: it may become a block, or it begins with the current
        block."""
        self._space = ""
        """Whitespace at the end of the content so far. Around calls, it is content only
        if more follows."""
        self._content = ""
        """All content so far, kept for unknown forms."""
        self._num_calls = 0
        """Number of calls in the blocks that have ended."""
        self._after_call = False
        """Whether the previous block was a call."""
        self._block: CallBlock | None = None
        self._deltas: list[Delta] = []
        """Deltas read but not returned yet."""

    def push(self, text: str) -> Delta:
        """Return what `text` adds to the reply, as far as it is certain."""
        self._text += text
        if not self._stream:
            return Delta()
        self._deltas.extend(self._read_text(is_last=False))
        return self._next_delta()

    def finish(self) -> tuple[Delta, ...]:
        """Return the rest of the reply, once the text is complete."""
        self._deltas.extend(self._read_text(is_last=True))
        if self._space and not self._num_calls:
            self._deltas.append(Delta(content=self._space))
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
        calls = []
        for delta in self._deltas:
            calls.extend(delta.calls)
        return Delta(content=content, calls=tuple(calls))

    def _next_delta(self) -> Delta:
        """Return as much as fits into one delta, in which content comes before calls.
        Content after a call is left for the next delta."""
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
        """Read the text as far as it is certain. `is_last`: no more text will come."""
        while self._text:
            if self._block is None:
                begin = self._find_block()
                if begin is None:
                    yield self._content_delta(self._take_content(is_last=is_last))
                    return
                yield self._content_delta(self._take(begin))
                self._block = self._new_block()
            end = self._find_end_of_block()
            if end is None and is_last:
                end = len(self._text)
            if self._stream:
                yield from self._stream_block(self._block, end)
            if end is None:
                return
            yield from self._close_block(self._block, end)

    def _find_block(self) -> int | None:
        """Return where the next block begins; None if no block has begun."""
        if not self._form.begins:
            return 0
        positions = []
        for mark in self._form.begins:
            position = self._text.find(mark)
            if position >= 0:
                positions.append(position)
        if positions:
            return min(positions)
        if not self._form_is_known and self._detector.has_tool_call(
            self._content + self._text
        ):
            return 0  # a call in another form of this family, without the mark
        return None

    def _find_end_of_block(self) -> int | None:
        """Return where the block that the text begins with ends, mark included; None if
        the mark has not come."""
        # The end is searched for after the beginning, unless one mark is both.
        start = 0
        begin_mark = self._begin_mark()
        if begin_mark not in self._form.ends:
            start = len(begin_mark)
        ends = []
        for mark in self._form.ends:
            position = self._text.find(mark, start)
            if position >= 0:
                ends.append(position + len(mark))
        return min(ends, default=None)

    def _begin_mark(self) -> str:
        """Return the mark that the text begins with; "" if it begins with none."""
        for mark in self._form.begins:
            if self._text.startswith(mark):
                return mark
        return ""

    def _new_block(self) -> CallBlock:
        make_block = block_type(self._form)
        return make_block(
            self._form,
            call_parser(self._parser_name, self._tools),
            tool_names=self._tool_names,
            turn_id=self._turn_id,
            first_index=self._num_calls,
        )

    def _stream_block(self, block: CallBlock, end: int | None) -> Iterator[Delta]:
        """Yield what has become certain of the block."""
        delta = block.stream(self._text, end)
        if delta.content:
            yield self._content_delta(delta.content)
        if delta.calls:
            yield self._calls_delta(delta.calls)

    def _close_block(self, block: CallBlock, end: int) -> Iterator[Delta]:
        """Yield what was not returned yet of the block, which has ended."""
        text = self._take(end)
        self._block = None
        delta = block.close(text)
        closes_calls = self._after_call and text == self._form.closing
        self._after_call = block.num_calls > 0
        if closes_calls and not self._after_call:
            return  # the mark after the last call is not content
        yield self._calls_delta(delta.calls)
        self._num_calls += block.num_calls
        if delta.content:
            yield self._content_delta(delta.content)

    def _take(self, length: int) -> str:
        taken = self._text[:length]
        self._text = self._text[length:]
        return taken

    def _take_content(self, *, is_last: bool) -> str:
        """Return the text in which no block has begun, without a possible beginning of
        a mark at its end."""
        held_back = 0
        if not is_last:
            held_back = partial_mark_length(self._text, self._form.begins)
        return self._take(len(self._text) - held_back)

    def _content_delta(self, text: str) -> Delta:
        """Return `text` as content. Whitespace at its end is held back until more
        content follows: around calls it is no content."""
        if not self._form_is_known:
            self._content += text
        text = self._space + text
        visible = text.rstrip()
        self._space = text[len(visible) :]
        return Delta(content=visible)

    def _calls_delta(self, calls: Iterable[CallDelta]) -> Delta:
        """Return the calls that add something, as far as `max_calls` permits."""
        shown = []
        for call in calls:
            is_permitted = self._max_calls is None or call.index < self._max_calls
            if is_permitted and (call.name or call.arguments):
                shown.append(call)
        return Delta(calls=tuple(shown))


def _mark_form(mark: str) -> CallForm:
    """Return the form of an unknown parser: from its mark on, everything is one
    block."""
    if not mark:
        return CallForm(begins=())
    return CallForm(begins=(mark,))
