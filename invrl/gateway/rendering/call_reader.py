"""Reads tool calls out of a reply's text, whole or as it arrives, in the order of the text.

The text is cut into blocks that may be a call and what stands around them, which is content. Each block gets
a parser of SGLang's to itself: one that cannot read a block neither loses what comes behind it nor takes the
arguments of the next call for its own. Invariant: nothing is lost. What is no call of a known tool is
content, a call that was cut short too, unless a stream has begun to tell it: then it ends where it was.

Calls of a family that marks their end are told as they arrive, those of others (Llama's, Mistral's) when the
reply has ended: behind a call of an unknown tool SGLang's incremental parsers tell some twice or make some
up. From such a list SGLang drops the calls of unknown tools; where calls have no mark at all (Pythonic), its
parser says what of a stream is content."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from invrl.gateway.types import CallDelta, Delta, Tool

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import Tool as SglangTool
    from sglang.srt.function_call.core_types import ToolCallItem
    from sglang.srt.function_call.function_call_parser import FunctionCallParser


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """A block begins with one of `begins` and ends with the first of `ends`; without `ends`, with the text.
    `outer`: what SGLang wants before a block that lacks it. `closing`: stands behind the last call.
    `lenient`: SGLang takes a block without its end for a whole call."""

    begins: tuple[str, ...]
    ends: tuple[str, ...] = ()
    outer: str = ""
    closing: str = ""
    lenient: bool = False


_DEEPSEEK = _Form(
    begins=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"),
    ends=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    outer="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
)
_FORMS = {
    "HermesDetector": _Form(begins=("<tool_call>",), ends=("</tool_call>",)),
    "Qwen3CoderDetector": _Form(begins=("<tool_call>",), ends=("</tool_call>",), lenient=True),
    "Qwen25Detector": _Form(begins=("<tool_call>\n",), ends=("\n</tool_call>",)),
    "DeepSeekV3Detector": _DEEPSEEK,
    "DeepSeekV31Detector": _DEEPSEEK,
    "DeepSeekV32Detector": _Form(
        begins=("<｜DSML｜function_calls>", "<｜DSML｜invoke"), ends=("</｜DSML｜function_calls>",)
    ),
    "MistralDetector": _Form(begins=("[TOOL_CALLS]",)),
}
"""By SGLang's parser. Any other one gets all from its first mark on."""


class CallReader:
    """One reply. `push` its text as it arrives, then `finish`; without `stream` all comes from `finish`.
    `max_calls`: those behind them are not told."""

    def __init__(
        self, name: str, tools: Sequence[Tool], *, turn_id: str, max_calls: int | None, stream: bool
    ) -> None:
        self._name, self._tools = name, tools
        self._turn_id, self._most_calls, self._stream = turn_id, max_calls, stream
        self._detector = call_parser(name, tools).detector
        self._names = {tool.name for tool in tools}
        mark = self._detector.bot_token
        form = _FORMS.get(type(self._detector).__name__)
        self._form = form or _Form(begins=(mark,) if mark else ())
        self._guessed = form is None
        self._incremental = bool(self._form.ends or not self._form.begins)
        self._text = ""
        """Not told yet: what may become a block, or the block."""
        self._space = ""
        """Behind a call: content if more of that follows."""
        self._content = ""
        """All that was told, for the forms that need it."""
        self._calls = 0
        """Of the blocks that are over."""
        self._behind = False
        """The last block was a call."""
        self._parser: FunctionCallParser | None = None
        """Of the block that `_text` begins with."""
        self._read = 0
        """So much of the block has its parser."""
        self._told: list[tuple[str, str]] = []
        """Name and arguments of the block's calls, as far as they were told."""
        self._known = False
        """The call that the block's parser is reading is of one of the tools."""
        self._waiting: list[Delta] = []

    def push(self, text: str) -> Delta:
        """What `text` adds, as far as it can be told yet."""
        self._text += text
        if not self._stream:
            return Delta()
        self._waiting += self._steps(last=False)
        return self._next()

    def finish(self) -> tuple[Delta, ...]:
        """The rest, once the text is whole."""
        self._waiting += self._steps(last=True)
        if not self._stream:
            content = "".join(delta.content for delta in self._waiting)
            calls = tuple(call for delta in self._waiting for call in delta.calls)
            return (Delta(content=content.strip() if self._calls else content, calls=calls),)
        rest = []
        while self._waiting:
            rest.append(self._next())
        return tuple(rest)

    def _next(self) -> Delta:
        """As much as one delta says in its order: content behind a call waits for the next one."""
        content, calls = "", ()
        while self._waiting and not (calls and self._waiting[0].content):
            delta = self._waiting.pop(0)
            content, calls = content + delta.content, calls + delta.calls
        return Delta(content=content, calls=calls)

    def _steps(self, *, last: bool) -> Iterator[Delta]:
        """Goes through the text as far as it can."""
        while self._text:
            if self._parser is None:
                at, found = self._begin(last)
                yield self._say(self._take(at))
                if not found:
                    return
                self._parser, self._read, self._told = call_parser(self._name, self._tools), 0, []
            end = self._end(last)
            sure = len(self._text) - _might(self._text, self._form.ends) if end is None else end
            piece = self._text[self._read : sure] if self._stream and self._incremental else ""
            # SGLang reads all of a block for every piece: the pieces grow with it.
            if piece and (end is not None or not self._form.begins or len(piece) * 20 >= self._read):
                self._read += len(piece)
                content, items = _read(self._parser.parse_stream_chunk, piece)
                yield self._say("" if self._form.begins else content)
                yield self._tell(items)
            if end is None:
                return
            yield from self._close(end)

    def _begin(self, last: bool) -> tuple[int, bool]:
        """Where a block begins, or might begin with what is to come; whether it does."""
        text, marks = self._text, self._form.begins
        if not marks:
            return 0, True
        if found := [at for mark in marks if (at := text.find(mark)) >= 0]:
            return min(found), True
        if self._guessed and self._detector.has_tool_call(self._content + text):  # in its other form
            return 0, True
        return len(text) - (0 if last else _might(text, marks)), False

    def _end(self, last: bool) -> int | None:
        """Where the block ends, behind its mark; None if that has not come."""
        mark = next((mark for mark in self._form.begins if self._text.startswith(mark)), "")
        start = 0 if mark in self._form.ends else len(mark)
        ends = [at + len(end) for end in self._form.ends if (at := self._text.find(end, start)) >= 0]
        return min(ends) if ends else len(self._text) if last else None

    def _close(self, end: int) -> Iterator[Delta]:
        """The block is whole: what its incremental parser kept back, or the block itself if it is no call."""
        assert self._parser is not None
        parser, self._parser, block = self._parser, None, self._take(end)
        outer = "" if block.startswith(self._form.outer) else self._form.outer
        content, found = _read(parser.parse_non_stream, outer + block)
        if self._form.lenient and not block.endswith(self._form.ends):
            found = []
        items = [item for item in found if item.name in self._names]
        yield Delta(calls=self._limited([self._missing(n, item) for n, item in enumerate(items)]))
        self._calls += len(self._told)
        if not self._told:
            closes = block == self._form.closing and self._behind
            said = self._content if self._stream and not self._form.begins else ""
            yield self._say(block[len(said) :] if block.startswith(said) and not closes else "")
        elif not self._form.ends:  # SGLang's parser says what is behind the calls
            yield self._say("" if self._stream and not self._form.begins else content)
        self._behind = bool(self._told)

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken

    def _say(self, text: str) -> Delta:
        """`text` is content. Space behind a call is content only if more of that follows."""
        text, self._space = self._space + text, ""
        if self._calls and text.isspace():
            text, self._space = "", text
        if not self._form.ends:
            self._content += text
        return Delta(content=text)

    def _tell(self, items: Sequence[ToolCallItem]) -> Delta:
        """What an incremental parser read: the first item of a call has its name."""
        calls = []
        for item in items if self._form.ends else ():
            self._known = item.name in self._names if item.name else self._known
            if item.name and self._known:
                calls.append(self._begun(item.name, item.parameters))
            elif self._told and self._known:
                calls.append(self._more(len(self._told) - 1, item.parameters))
        return Delta(calls=self._limited(calls))

    def _missing(self, place: int, item: ToolCallItem) -> CallDelta:
        """What was not told yet of the block's call at `place`."""
        name, arguments = item.name or "", _sayable(item.parameters)
        if place >= len(self._told):
            return self._begun(name, arguments)
        begun, known = self._told[place]
        same = begun == name and arguments.startswith(known)
        return self._more(place, arguments[len(known) :] if same else "")

    def _begun(self, name: str, arguments: str) -> CallDelta:
        """Ids are the turn's and the place's: a turn that is told again has the same."""
        index, arguments = self._calls + len(self._told), _sayable(arguments)
        self._told.append((name, arguments))
        made = hashlib.blake2b(f"{self._turn_id}.{index}".encode(), digest_size=12).hexdigest()
        return CallDelta(index=index, id=f"call_{made}", name=name, arguments=arguments)

    def _more(self, place: int, arguments: str) -> CallDelta:
        name, known = self._told[place]
        self._told[place] = name, known + (arguments := _sayable(arguments))
        return CallDelta(index=self._calls + place, arguments=arguments)

    def _limited(self, calls: Iterable[CallDelta]) -> tuple[CallDelta, ...]:
        most = self._most_calls
        return tuple(c for c in calls if (c.name or c.arguments) and (most is None or c.index < most))


def _read(
    parse: Callable[[str], tuple[str, list[ToolCallItem]]], text: str
) -> tuple[str, Sequence[ToolCallItem]]:
    """Content and calls. SGLang's parsers raise what they like for JSON that is no call, or is too deep."""
    try:
        return parse(text)
    except Exception:
        return "", ()


def _might(text: str, marks: Iterable[str]) -> int:
    """Characters at the text's end that may become one of the marks."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)


def call_parser(name: str, tools: Sequence[Tool]) -> FunctionCallParser:
    """SGLang's parser of that name. ValueError if there is none."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    return FunctionCallParser(_sglang_tools(tuple(tools)), name)


@functools.lru_cache(maxsize=256)
def _sglang_tools(tools: tuple[Tool, ...]) -> list[SglangTool]:
    from sglang.srt.entrypoints.openai.protocol import Tool as SglangTool

    functions = [{**asdict(tool), "parameters": json.loads(tool.parameters or "null")} for tool in tools]
    return [SglangTool.model_validate({"type": "function", "function": each}) for each in functions]


def _sayable(arguments: str) -> str:
    """Without what UTF-8 cannot say: SGLang writes halves of surrogate pairs, which a model may sample."""
    return arguments.encode(errors="replace").decode()
