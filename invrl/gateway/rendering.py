"""Messages to token ids and sampled ids to text, with a model's own template and tokenizer. Pure.

A first turn is the template's whole rendering. A turn that continues is the exact ids of its path plus
the rendered tail: template(all messages) must start with template(what the path stands for), and only
what follows is tokenised. Where the template takes earlier thinking out, the tail is what follows the
same end of turn, if thinking is kept. Invariant: ids that an engine consumed or emitted are never made
again from text. Made by `model_folder.py`; used by `turns.py` and `generation.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from invrl.errors import SessionError
from invrl.gateway.forest import ForkReason
from invrl.gateway.message import Message, Prompt

_PROBE = "invrl-probe"
_UNFINISHED = "�"


class TextTokenizer(Protocol):
    """The part of tokenizers.Tokenizer that is used here."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, special: bool) -> str: ...


class Template(Protocol):
    """A model's chat template."""

    def __call__(self, prompt: Prompt, *, add_generation_prompt: bool) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Ids to append to a path, or why the path cannot be continued."""

    ids: list[int]
    fork: ForkReason | None = None
    kept_thinking: bool = False
    """The path holds thinking that the template would have taken out."""


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
        self._after_reply, self.end_of_turn, self.end_of_turn_id = self._find_end_of_turn()
        self.end_ids = end_ids if self.end_of_turn_id is None else end_ids | {self.end_of_turn_id}
        """Tokens that end a turn; the engine must stop at each."""

    def first(self, prompt: Prompt) -> list[int]:
        """The whole conversation and the head of the reply. SessionError 400 if the template refuses."""
        return self.encode(self.text(prompt))

    def tail(self, prompt: Prompt, depth: int, *, closed: bool) -> Tail:
        """What follows the recorded ids of the first `depth` messages. `closed`: they end with the
        template's end-of-turn token; otherwise (out of tokens, a stop string) the tail begins with it, as
        context that was not sampled."""
        full = self.text(prompt)
        earlier = replace(prompt, messages=prompt.messages[:depth])
        recorded = self.text(earlier, add_generation_prompt=False)
        mark, kept = self.end_of_turn or self._after_reply, False
        if full.startswith(recorded):
            end = recorded.rfind(mark)
        else:
            thought = any(each.reasoning or "</think>" in each.content for each in earlier.messages)
            if not (thought and self._keep_thinking and self.end_of_turn):
                reason = ForkReason.THINKING_STRIPPED if thought else ForkReason.TEMPLATE_CHANGED
                return Tail(ids=[], fork=reason)
            end, kept = _nth(full, mark, recorded.count(mark)), True
        if end < 0:
            return Tail(ids=[], fork=ForkReason.TEMPLATE_CHANGED)
        return Tail(
            ids=self.encode(full[end + (len(self.end_of_turn) if closed else 0) :]), kept_thinking=kept
        )

    def is_closed(self, sampled_ids: Sequence[int]) -> bool:
        return bool(sampled_ids) and sampled_ids[-1] == self.end_of_turn_id

    def reply_text(self, sampled_ids: Sequence[int], *, special: bool = False) -> str:
        """A reply's text without the token that ended it. `special`: other special tokens are shown."""
        ids = sampled_ids[:-1] if sampled_ids and sampled_ids[-1] in self.end_ids else sampled_ids
        return self._tokenizer.decode(ids, special=special)

    def shown(self, ids: Sequence[int]) -> str:
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
        except Exception as error:  # templates raise what they like, mostly jinja2.TemplateError
            reason = f"the model's chat template refuses this conversation: {error}"
            raise SessionError(reason, status=400, code="invalid_messages") from error

    def encode(self, text: str) -> list[int]:
        """SessionError 400 for a token that the model has not."""
        ids = self._tokenizer.encode(text)
        if ids and max(ids) >= self._vocab_size:  # such an id would end the engine's process
            reason = f"token {max(ids)} is outside of the model's vocabulary ({self._vocab_size})"
            raise SessionError(reason, status=400, code="invalid_messages")
        return ids

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
        whole = self._decode(self._ids)
        self._text = whole if whole.startswith(self._text) else self._text + self._unread()[1]
        return self._send(self._cut())

    @property
    def text(self) -> str:
        """All that was shown."""
        return self._text[: self._sent]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._renderer.reply_text(ids, special=self._special)

    def _unread(self) -> tuple[bool, str]:
        """Text of the ids since the last whole character, and whether it ends with one."""
        context = self._decode(self._ids[self._shown_from : self._read_to])
        text = self._decode(self._ids[self._shown_from :])
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
