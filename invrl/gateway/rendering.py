"""Messages to token ids and sampled ids to text, with a model's own template and tokenizer. Pure.

A first turn is the template's whole rendering. A turn that continues is the exact ids of its path plus
the rendered tail: template(all messages) must start with template(what the path stands for), and only
what follows is tokenised. Invariant: ids that an engine consumed or emitted are never made again from
text. Made by `model_folder.py`; used by `turns.py` and `generation.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from invrl.errors import SessionError
from invrl.gateway.forest import ForkReason, Message

_PROBE = "invrl-probe"
_UNFINISHED = "�"


class TextTokenizer(Protocol):
    """The part of tokenizers.Tokenizer that is used here."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Ids to append to a path, or why the path cannot be continued."""

    ids: list[int]
    fork: ForkReason | None = None


class Renderer:
    """`template(messages, add_generation_prompt) -> text` and a tokenizer, made to agree."""

    def __init__(
        self,
        template: Callable[[Sequence[Message], bool], str],
        tokenizer: TextTokenizer,
        *,
        end_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        self._template, self._tokenizer, self._vocab_size = template, tokenizer, vocab_size
        self._after_reply, self.end_of_turn, self.end_of_turn_id = self._find_end_of_turn()
        self.end_ids = end_ids if self.end_of_turn_id is None else end_ids | {self.end_of_turn_id}
        """Tokens that end a turn; the engine must stop at each."""

    def first(self, messages: Sequence[Message]) -> list[int]:
        """The whole conversation and the head of the reply. SessionError 400 if the template refuses."""
        return self._encode(self._text(messages, True))

    def tail(self, messages: Sequence[Message], depth: int, *, closed: bool) -> Tail:
        """What follows the recorded ids of `messages[:depth]`. `closed`: they end with the template's
        end-of-turn token; otherwise (out of tokens, a stop string) the tail begins with it, as context
        that was not sampled."""
        full = self._text(messages, True)
        recorded = self._text(messages[:depth], False)
        if not full.startswith(recorded):
            thinking = any("</think>" in message.content for message in messages[:depth])
            reason = ForkReason.THINKING_STRIPPED if thinking else ForkReason.TEMPLATE_CHANGED
            return Tail(ids=[], fork=reason)
        end = recorded.rfind(self.end_of_turn or self._after_reply)
        if end < 0:
            return Tail(ids=[], fork=ForkReason.TEMPLATE_CHANGED)
        return Tail(ids=self._encode(full[end + (len(self.end_of_turn) if closed else 0) :]))

    def is_closed(self, sampled_ids: Sequence[int]) -> bool:
        return bool(sampled_ids) and sampled_ids[-1] == self.end_of_turn_id

    def text(self, sampled_ids: Sequence[int]) -> str:
        """A reply's text: without the token that ended it, special tokens not shown."""
        ids = sampled_ids[:-1] if sampled_ids and sampled_ids[-1] in self.end_ids else sampled_ids
        return self._tokenizer.decode(ids)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id])

    def stream(self, stop: Sequence[str]) -> TextStream:
        return TextStream(self, stop)

    def _text(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return self._template(messages, add_generation_prompt)
        except Exception as error:  # templates raise what they like, mostly jinja2.TemplateError
            reason = f"the model's chat template refuses this conversation: {error}"
            raise SessionError(reason, status=400, code="invalid_messages") from error

    def _encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text)
        if ids and max(ids) >= self._vocab_size:  # such an id would end the engine's process
            reason = f"token {max(ids)} is outside of the model's vocabulary ({self._vocab_size})"
            raise SessionError(reason, status=400, code="invalid_messages")
        return ids

    def _find_end_of_turn(self) -> tuple[str, str, int | None]:
        """What the template writes after a reply, and the special token that it begins with (text, id):
        ("", None) for a template that ends turns otherwise."""
        text = self._text([Message("user", "x"), Message("assistant", _PROBE)], False)
        after = text[text.rfind(_PROBE) + len(_PROBE) :]
        ids = self._tokenizer.encode(after)
        if not ids or self._tokenizer.decode(ids[:1]):  # special tokens decode to nothing
            return after, "", None
        end = next(n for n in range(1, len(after) + 1) if self._tokenizer.encode(after[:n]) == ids[:1])
        return after, after[:end], ids[0]


class TextStream:
    """Text of a reply as its ids arrive. Never splits a character, shows nothing of a stop string nor
    of what might become one; the pieces joined are the reply's text."""

    def __init__(self, renderer: Renderer, stop: Sequence[str]) -> None:
        self._renderer, self._stop = renderer, tuple(stop)
        self._ids: list[int] = []
        self._shown_from = 0
        """Ids before this one have been decoded for good; a few of them are context for the rest."""
        self._read_to = 0
        self._text = ""
        self._sent = 0

    def push(self, ids: Sequence[int]) -> str:
        """New text that may be shown."""
        self._ids.extend(ids)
        whole_characters, text = self._unread()
        if text and whole_characters:
            self._text += text
            self._shown_from, self._read_to = self._read_to, len(self._ids)
        return self._send(self._safe_length())

    def finish(self) -> str:
        """The rest, once the last id has been pushed."""
        whole = self._renderer.text(self._ids)
        self._text = whole if whole.startswith(self._text) else self._text + self._unread()[1]
        return self._send(self._cut())

    @property
    def text(self) -> str:
        """All that was shown."""
        return self._text[: self._sent]

    def _unread(self) -> tuple[bool, str]:
        """Text of the ids since the last whole character, and whether it ends with one."""
        context = self._renderer.text(self._ids[self._shown_from : self._read_to])
        text = self._renderer.text(self._ids[self._shown_from :])
        return not text.endswith(_UNFINISHED), text[len(context) :]

    def _send(self, end: int) -> str:
        piece = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _cut(self) -> int:
        """Where the first stop string starts, or the end."""
        return min([at for stop in self._stop if (at := self._text.find(stop)) >= 0], default=len(self._text))

    def _safe_length(self) -> int:
        cut = self._cut()
        if cut < len(self._text):
            return cut
        starts = (stop[:size] for stop in self._stop for size in range(1, len(stop)))
        return len(self._text) - max((len(part) for part in starts if self._text.endswith(part)), default=0)
