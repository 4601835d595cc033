"""Messages to token ids and sampled ids to text, with a model's own template and tokenizer. Pure.

A first turn is the template's whole rendering. A turn that continues is the exact ids of its path plus
the rendered tail: the rendering of all messages must begin, but for thinking, with the rendering of what
the path stands for, and only what follows the same end of turn is tokenised. Where the path holds thinking
that the template takes out, it goes on only if thinking is kept. Invariant: ids that an engine consumed or
emitted are never made again from text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from invrl.errors import SessionError
from invrl.gateway.rendering.prompt_cache import PromptCache
from invrl.gateway.types import ForkReason, Message, Prompt, ToolCall

_PROBE = "invrl-probe"
_CALL = Message("assistant", tool_calls=(ToolCall("call-1", "probe", "{}"),))
_RESULT = Message("tool", "1", tool_call_id="call-1")
_LOOP = (Message("user", "x"), _CALL, _RESULT, _CALL, _RESULT)
_THINK, _THOUGHT = "<think>", "</think>"
_UNFINISHED = "�"
LARGE_TEXT = 32_768
"""Characters from which on a text is tokenised so that other threads run meanwhile, and its length is looked
at first."""


class PromptTooLong(Exception):
    """A prompt has more tokens than there is room for: `tokens`, or `exact` being false, at least so many."""

    def __init__(self, tokens: int, *, exact: bool) -> None:
        super().__init__(f"{tokens} tokens")
        self.tokens = tokens
        self.exact = exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How many tokens a prompt may have. `exact`: one that has more is to be counted, not estimated."""

    tokens: int
    exact: bool = False


class TextTokenizer(Protocol):
    """The part of tokenizers.Tokenizer that is used here."""

    def encode(self, text: str, *, max_ids: int | None = None) -> list[int]:
        """PromptTooLong, which is exact, for more than `max_ids` ids."""
        ...

    def min_tokens(self, text: str) -> int:
        """A number of tokens that the text has in any case, known without tokenising it; 0 if nothing is."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool) -> str: ...


class Template(Protocol):
    """A model's chat template."""

    def __call__(self, prompt: Prompt, *, add_generation_prompt: bool) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Ids to append to a path, or why the path cannot be continued."""

    ids: list[int]
    fork: ForkReason | None = None
    kept_thinking: int = 0
    """Ids of thinking in the path that the template would have taken out."""


class Renderer:
    """A chat template and a tokenizer, made to agree."""

    def __init__(
        self,
        template: Template,
        tokenizer: TextTokenizer,
        *,
        end_ids: frozenset[int],
        vocab_size: int,
        keep_thinking: bool = True,
    ) -> None:
        self._template, self._tokenizer, self._vocab_size = template, tokenizer, vocab_size
        self._keep_thinking = keep_thinking
        self._firsts = PromptCache()
        self.after_reply, self.end_of_turn, self.end_of_turn_id = self._find_end_of_turn()
        marks = [tokenizer.encode(mark) for mark in (_THINK, _THOUGHT)]
        self._thinking_ids = [ids[0] for ids in marks] if all(len(ids) == 1 for ids in marks) else []
        self._steady = self._takes(*_LOOP, Message("assistant", "y"), Message("assistant", "y"))
        self.parallel_calls = self._takes(_LOOP[0], replace(_CALL, tool_calls=_CALL.tool_calls * 2))
        """The template shows more than one call in a reply."""
        self.end_ids = end_ids if self.end_of_turn_id is None else end_ids | {self.end_of_turn_id}
        """Tokens that end a turn; the engine must stop at each."""

    def render_first(self, prompt: Prompt, room: Room | None = None) -> list[int]:
        """The whole conversation and the head of the reply. SessionError 400 if the template refuses,
        PromptTooLong if there is no room for it."""
        ids = self._firsts.get(prompt)
        if ids is None:
            ids = self.encode(self.text(prompt), room)
            self._firsts.put(prompt, ids)
        return ids

    def render_tail(self, prompt: Prompt, depth: int, path: Sequence[int], room: Room | None = None) -> Tail:
        """What follows `path`, the recorded ids of the first `depth` messages. If they do not end with the
        template's end-of-turn token (out of tokens, a stop string), the tail begins with it, as context
        that was not sampled. PromptTooLong if there is no room for both."""
        full, mark = self.text(prompt), self.end_of_turn or self.after_reply
        earlier = replace(prompt, messages=prompt.messages[:depth])
        recorded = self.text(earlier, add_generation_prompt=False)
        shown = recorded.removesuffix(self.after_reply)
        changed = Tail(ids=[], fork=ForkReason.TEMPLATE_CHANGED)
        if not recorded.endswith(self.after_reply):
            return changed
        asked = replace(prompt, messages=prompt.messages[: depth - 1])
        if not (self._steady or self._follows(self.text(asked), shown)):
            return changed
        end = len(shown)
        if not full.startswith(shown + mark):
            end = _nth(full, mark, shown.count(mark) + 1) if mark else -1
            if end < 0 or not self._repeats(full[:end], shown):
                return changed
        kept = self._left_out(path, earlier.messages, full[:end])
        if kept and not self._keep_thinking:
            return Tail(ids=[], fork=ForkReason.THINKING_STRIPPED)
        closed = len(self.end_of_turn) if self.is_closed(path) else 0
        return Tail(ids=self.encode(full[end + closed :], room, before=len(path)), kept_thinking=kept)

    def is_closed(self, sampled_ids: Sequence[int]) -> bool:
        return bool(sampled_ids) and sampled_ids[-1] == self.end_of_turn_id

    def reply_text(self, sampled_ids: Sequence[int], *, special: bool = False) -> str:
        """A reply's text without the token that ended it. `special`: other special tokens are shown."""
        ids = sampled_ids[:-1] if sampled_ids and sampled_ids[-1] in self.end_ids else sampled_ids
        return self._tokenizer.decode(ids, special=special)

    def decode(self, ids: Sequence[int]) -> str:
        """All that the ids stand for, special tokens too."""
        return self._tokenizer.decode(ids, special=True)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], special=False)

    def stream(self, stop: Sequence[str], *, special: bool = False) -> TextStream:
        return TextStream(self, stop, special=special)

    def text(self, prompt: Prompt, *, add_generation_prompt: bool = True) -> str:
        """As the template shows it. SessionError 400 if it refuses."""
        try:
            return self._template(prompt, add_generation_prompt=add_generation_prompt)
        except ImportError:  # jinja2 is missing: no fault of the template or the conversation
            raise
        except Exception as error:  # templates raise what they like, mostly jinja2.TemplateError
            reason = f"the model's chat template refuses this conversation: {error}"
            raise SessionError(reason, status=400, code="invalid_messages") from error

    def encode(self, text: str, room: Room | None = None, *, before: int = 0) -> list[int]:
        """SessionError 400 for a token that the model has not. PromptTooLong if there is no room for the text
        behind `before` other tokens: where possible, this is said before a large text is tokenised."""
        most = None if room is None else room.tokens - before
        if room is not None and most is not None and not room.exact and len(text) >= LARGE_TEXT:
            least = self._tokenizer.min_tokens(text)
            if least > most:
                raise PromptTooLong(before + least, exact=False)
        try:
            ids = self._tokenizer.encode(text, max_ids=most)
        except PromptTooLong as error:
            raise PromptTooLong(before + error.tokens, exact=True) from None
        if ids and max(ids) >= self._vocab_size:  # such an id would end the engine's process
            reason = f"token {max(ids)} is outside of the model's vocabulary ({self._vocab_size})"
            raise SessionError(reason, status=400, code="invalid_messages")
        return ids

    def unthinking(self, text: str) -> str:
        """`text` without thinking and whitespace: templates trim both as they please."""
        return "".join("".join(self._between(text, self._thoughts(text))).split())

    def _thoughts(self, text: str) -> dict[int, int]:
        """Where each thought begins and ends, marks and all; it ends within its turn. Takes time in
        proportion to the text, whatever an agent sends."""
        found, at, end, turn = dict[int, int](), 0, -1, -1
        while (begin := text.find(_THINK, at)) >= 0:
            end = text.find(_THOUGHT, begin) if end < begin else end
            if end < 0:
                break
            if turn <= begin:
                turn = text.find(self.end_of_turn or _THINK, begin + 1)
                turn = len(text) if turn < 0 else turn
            at = turn if turn < end else end + len(_THOUGHT)
            if at > end:
                found[begin] = at
        return found

    def _between(self, text: str, thoughts: Mapping[int, int]) -> list[str]:
        begins, ends = [*thoughts, len(text)], [0, *thoughts.values()]
        return [text[end:begin] for end, begin in zip(ends, begins, strict=True)]

    def _repeats(self, head: str, shown: str) -> bool:
        """Whether `head` is what was `shown`, but for thinking and the space around it."""
        head, shown = f"|{head}|", f"|{shown}|"
        thoughts, at = self._thoughts(head), 0
        for place, part in enumerate(map(str.strip, self._between(shown, self._thoughts(shown)))):
            if place:
                at = _past_space(head, at)
                if at in thoughts and not (part and head.startswith(part, at)):
                    at = _past_space(head, thoughts[at])
            if not head.startswith(part, at):
                return False
            at += len(part)
        return at == len(head)

    def _follows(self, asked: str, answered: str) -> bool:
        """Whether a reply stands behind its own prompt, but for thinking that the prompt opens."""
        head = self.unthinking(asked).removesuffix(_THINK).removesuffix(_THOUGHT)
        return self.unthinking(answered).startswith(head)

    def _left_out(self, path: Sequence[int], messages: Sequence[Message], head: str) -> int:
        """Ids of the path's thinking that `head`, the template's rendering of its messages, has not. What
        templates leave out is the oldest."""
        if not self._thinking_ids:  # no special tokens of this tokenizer
            thoughts = [m.reasoning or m.content.rpartition(_THOUGHT)[0] for m in messages]
            shown = self._tokenizer.decode(path, special=True) if any(thoughts) else ""
            return sum(len(self._tokenizer.encode(t)) for t in thoughts if t not in head and t in shown)
        opens, closes = self._thinking_ids
        more = max(path.count(opens) - head.count(_THINK), path.count(closes) - head.count(_THOUGHT), 0)
        starts = [at for at, each in enumerate(path) if each == opens][:more] if more else []
        ends = [at for at, each in enumerate(path) if each == closes] if more else []
        lengths = (next((end for end in ends if end > at), len(path) - 1) - at + 1 for at in starts)
        return max(sum(lengths), more)

    def _takes(self, *messages: Message) -> bool:
        """Whether the template renders such a conversation, and each reply behind its own prompt."""
        try:
            for at in (at for at, message in enumerate(messages) if message.role == "assistant"):
                asked = self.text(Prompt(messages=messages[:at]))
                answered = self.text(Prompt(messages=messages[: at + 1]), add_generation_prompt=False)
                if not self._follows(asked, answered):
                    return False
        except SessionError:
            return False
        return True

    def _find_end_of_turn(self) -> tuple[str, str, int | None]:
        """What the template writes after a reply, and the special token that it begins with (text, id):
        ("", None) for a template that ends turns otherwise."""
        probe = Prompt(messages=(Message("user", "x"), Message("assistant", _PROBE)))
        text = self.text(probe, add_generation_prompt=False)
        after = text[text.rfind(_PROBE) + len(_PROBE) :]
        ids = self._tokenizer.encode(after)
        if not ids or self._tokenizer.decode(ids[:1], special=False):  # special tokens are not shown
            return after, "", None
        end = next(n for n in range(1, len(after) + 1) if self._tokenizer.encode(after[:n]) == ids[:1])
        return after, after[:end], ids[0]


_SPACE = re.compile(r"\s*")


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _nth(text: str, part: str, count: int) -> int:
    """Where `part` begins for the `count`-th time; -1 if it does not."""
    at = -1
    for _ in range(count):
        at = text.find(part, at + 1)
        if at < 0:
            break
    return at


class TextStream:
    """Text of a reply as its ids arrive. Never splits a character, shows nothing of a stop string nor
    of what might become one; the pieces joined are the reply's text."""

    def __init__(self, renderer: Renderer, stop: Sequence[str], *, special: bool = False) -> None:
        self._renderer, self._stop, self._special = renderer, tuple(stop), special
        self._ids: list[int] = []
        """The last ones: the first `_read` of them are in `_text`, and context for the rest."""
        self._read = 0
        self._text = ""
        """Not sent yet: a stop string, or what may become one."""

    def push(self, ids: Sequence[int]) -> str:
        """New text that may be shown."""
        self._ids += ids
        whole_characters, text = self._unread()
        if text and whole_characters:
            self._text += text
            del self._ids[: self._read]
            self._read = len(self._ids)
        return self._send(self._safe_length())

    def finish(self) -> str:
        """The rest, once the last id has been pushed."""
        if self._read < len(self._ids):
            self._text += self._unread()[1]
        return self._send(self._cut())

    def _decode(self, ids: Sequence[int]) -> str:
        return self._renderer.reply_text(ids, special=self._special)

    def _unread(self) -> tuple[bool, str]:
        """Text of the ids since the last whole character, and whether it ends with one."""
        context = self._decode(self._ids[: self._read])
        text = self._decode(self._ids)
        return not text.endswith(_UNFINISHED), text[len(context) :]

    def _send(self, end: int) -> str:
        piece, self._text = self._text[:end], self._text[end:]
        return piece

    def _cut(self) -> int:
        """Where the first stop string starts, or the end."""
        found = [at for stop in self._stop if (at := self._text.find(stop)) >= 0]
        return min(found) if found else len(self._text)

    def _safe_length(self) -> int:
        cut = self._cut()
        if cut < len(self._text) or not self._stop:
            return cut
        starts = (stop[:size] for stop in self._stop for size in range(1, len(stop)))
        return len(self._text) - max((len(part) for part in starts if self._text.endswith(part)), default=0)
