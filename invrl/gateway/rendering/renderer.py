"""Renders messages to token ids and decodes sampled ids, with a model's own chat
template and tokenizer.

The prompt of a first turn is the template's whole rendering. The prompt of a turn that
continues a recorded path is the exact ids of the path plus a rendered tail: the
rendering of all messages must begin with the rendering of the recorded ones, ignoring
thinking, and only the part after the same end of turn is tokenized. If the path has
thinking that the template removes, it is continued only if thinking is kept. Invariant:
ids that an engine consumed or sampled are never recomputed from text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from invrl.errors import SessionError
from invrl.gateway.rendering.content_marks import double_marks, without_marks
from invrl.gateway.rendering.model_text import Template, TextTokenizer
from invrl.gateway.rendering.prompt_cache import PromptCache
from invrl.gateway.rendering.prompt_room import LARGE_TEXT, PromptTooLong, Room
from invrl.gateway.rendering.text_stream import TextStream
from invrl.gateway.rendering.thinking import (
    END_THINK,
    THINK,
    equal_without_thinking,
    without_thinking,
)
from invrl.gateway.types import ForkReason, Message, Prompt, ToolCall

_PROBE = "invrl-probe"
_PROBE_CALL = Message("assistant", tool_calls=(ToolCall("call-1", "probe", "{}"),))
_PROBE_RESULT = Message("tool", "1", tool_call_id="call-1")
_PROBE_TWO_CALLS = replace(_PROBE_CALL, tool_calls=_PROBE_CALL.tool_calls * 2)
_PROBE_QUESTION = Message("user", "x")
_PROBE_REPLY = Message("assistant", "y")
_PROBE_TOOL_LOOP = (
    _PROBE_QUESTION,
    _PROBE_CALL,
    _PROBE_RESULT,
    _PROBE_CALL,
    _PROBE_RESULT,
    _PROBE_REPLY,
    _PROBE_REPLY,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Ids to append to a recorded path, or the reason that it cannot be continued."""

    ids: list[int]
    fork: ForkReason | None = None
    kept_thinking: int = 0
    """Ids of thinking in the path that the template would have removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TurnEnd:
    """End of a reply in a template."""

    after_reply: str
    """Everything that it writes after a reply."""
    token: str = ""
    """Special token that this begins with; "" if it begins with no special token."""
    token_id: int | None = None


class Renderer:
    """A chat template and a tokenizer, with their common properties."""

    def __init__(
        self,
        template: Template,
        tokenizer: TextTokenizer,
        *,
        end_ids: frozenset[int],
        vocab_size: int,
        keep_thinking: bool = True,
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._keep_thinking = keep_thinking
        self._prompt_cache = PromptCache()
        turn_end = self._find_turn_end()
        self.after_reply = turn_end.after_reply
        self.end_of_turn = turn_end.token
        self.end_of_turn_id = turn_end.token_id
        self.end_ids = end_ids
        """Tokens that end a turn; the engine must stop at each of them."""
        if turn_end.token_id is not None:
            self.end_ids = end_ids | {turn_end.token_id}
        self._thinking_ids = self._find_thinking_ids()
        self._replies_follow_prompts = self._renders_replies_behind_prompts(
            *_PROBE_TOOL_LOOP
        )
        """Whether the template renders every reply of a conversation with tools after
        its prompt."""
        self.parallel_calls = self._renders_replies_behind_prompts(
            _PROBE_QUESTION, _PROBE_TWO_CALLS
        )
        """Whether the template renders more than one call in a reply."""

    def preload(self) -> None:
        """Load what only some prompts need, before the first of them has to wait for
        it."""
        self._tokenizer.preload()

    def render_first(self, prompt: Prompt, room: Room | None = None) -> list[int]:
        """Return the ids of the whole conversation and of the beginning of the reply.
        Raises SessionError 400 if the template refuses the conversation, PromptTooLong
        if there is no room for it."""
        ids = self._prompt_cache.get(prompt)
        if ids is None:
            ids = self.encode(self.text(prompt), room)
            self._prompt_cache.put(prompt, ids)
        return ids

    def render_tail(
        self,
        prompt: Prompt,
        depth: int,
        path: Sequence[int],
        room: Room | None = None,
    ) -> Tail:
        """Render what follows `path`, the recorded ids of the first `depth` messages.
        If the path does not end with the template's end-of-turn token (the reply was
        out of tokens, or met a stop string), the tail begins with that token, as
        context that was not sampled. Raises PromptTooLong if there is no room for
        both."""
        template_changed = Tail(ids=[], fork=ForkReason.TEMPLATE_CHANGED)
        full = self.text(prompt)
        earlier = replace(prompt, messages=prompt.messages[:depth])
        recorded = self.text(earlier, add_generation_prompt=False)
        if not recorded.endswith(self.after_reply):
            return template_changed
        recorded = recorded.removesuffix(self.after_reply)
        if not self._replies_follow_prompts:
            before_reply = replace(prompt, messages=prompt.messages[: depth - 1])
            asked = self.text(before_reply)
            if not self._follows(asked, recorded):
                return template_changed
        end = self._recorded_end(full, recorded)
        if end is None:
            return template_changed
        removed_thinking = self._removed_thinking(path, earlier.messages, full[:end])
        if removed_thinking and not self._keep_thinking:
            return Tail(ids=[], fork=ForkReason.THINKING_STRIPPED)
        if self.is_closed(path):
            end += len(self.end_of_turn)
        ids = self._encode_behind(path, full[end:], room)
        if (
            self.end_of_turn_id is None
            and path
            and path[-1] in self.end_ids
            and ids[:1] == list(path[-1:])
        ):
            # GLM's replies end with the mark of the next message, which the template
            # writes at its beginning.
            ids = ids[1:]
        return Tail(ids=ids, kept_thinking=removed_thinking)

    def render_text(
        self, text: str, room: Room | None = None, *, path: Sequence[int] = ()
    ) -> list[int]:
        """Return the ids of a text that no template has rendered, after those of
        `path`. If it begins a prompt, the token that begins a sequence comes first, for
        tokenizers that have one, unless the text has it itself. Raises PromptTooLong if
        there is no room for both."""
        text = double_marks(text)
        if path:
            return self._encode_behind(path, text, room)
        begin_ids = list(self._tokenizer.begin_ids)
        ids = self.encode(text, room, before=len(begin_ids))
        if ids[: len(begin_ids)] == begin_ids:
            return ids
        return begin_ids + ids

    def encode_after(self, before: str, text: str) -> list[int]:
        """Return the ids of `text` after the text `before`, whose ids stay
        unchanged."""
        if self.end_of_turn:
            # What stands before a special token has no influence on what stands behind
            # it.
            before = before[max(before.rfind(self.end_of_turn), 0) :]
        before_ids = self.encode(before)
        ids = self.encode(before + text)
        if ids[: len(before_ids)] == before_ids:
            return ids[len(before_ids) :]
        return self.encode(text, inside=True)

    def num_control_tokens(self, messages: Sequence[Message]) -> int:
        """See `Template.num_control_tokens`."""
        return self._template.num_control_tokens(messages)

    def is_closed(self, sampled_ids: Sequence[int]) -> bool:
        """Whether the reply ends with the template's end-of-turn token."""
        if not sampled_ids:
            return False
        return sampled_ids[-1] == self.end_of_turn_id

    def reply_text(
        self, sampled_ids: Sequence[int], *, special: bool = False, inside: bool = False
    ) -> str:
        """Return the text of a reply without the token that ended it. `special`: other
        special tokens are included. `inside`: a space that it begins with is part of
        it, as in a text that no template wraps."""
        ends_turn = bool(sampled_ids) and sampled_ids[-1] in self.end_ids
        if ends_turn:
            sampled_ids = sampled_ids[:-1]
        return self._tokenizer.decode(sampled_ids, special=special, inside=inside)

    def decode(self, ids: Sequence[int], *, inside: bool = False) -> str:
        """Return the text of the ids, special tokens included. `inside`: the ids follow
        others."""
        return self._tokenizer.decode(ids, special=True, inside=inside)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token; "" for a special token."""
        return self._tokenizer.decode([token_id], special=False)

    def stream(
        self, stop: Sequence[str], *, special: bool = False, inside: bool = False
    ) -> TextStream:
        """Return the text of one reply as its ids arrive, up to a stop string.
        `special` and `inside` as in `reply_text`."""
        return TextStream(
            partial(self.reply_text, special=special, inside=inside), stop
        )

    def text(self, prompt: Prompt, *, add_generation_prompt: bool = True) -> str:
        """Return the prompt as the template renders it, with marks in the control
        tokens of contents (`content_marks.py`). Raises SessionError 400 if the template
        refuses it."""
        try:
            return self._template(prompt, add_generation_prompt=add_generation_prompt)
        except ImportError:
            # jinja2 is missing: neither the template nor the conversation is at fault
            raise
        except Exception as error:  # a template may raise any exception; most raise jinja2.TemplateError
            raise _refusal(error) from error

    def last_marked_reply(self, messages: Prompt) -> tuple[int, int] | None:
        """See `Template.last_marked_reply`. Raises SessionError 400 if it refuses the
        messages."""
        try:
            return self._template.last_marked_reply(messages)
        except ImportError:
            raise
        except Exception as error:
            raise _refusal(error) from error

    def encode(
        self,
        text: str,
        room: Room | None = None,
        *,
        before: int = 0,
        inside: bool = False,
    ) -> list[int]:
        """Return the ids of a text. `before` other tokens take some of the room.
        `inside`: the text follows them, and does not begin a prompt. Raises
        PromptTooLong if there is no room for it, if possible before a large text is
        tokenized, and SessionError 400 if the text has a token that is not in the
        model's vocabulary."""
        max_ids = None
        if room is not None:
            max_ids = room.tokens - before
            if not room.exact:
                self._check_min_tokens(text, max_ids, before)
        try:
            ids = self._tokenizer.encode(text, inside=inside, max_ids=max_ids)
        except PromptTooLong as error:
            raise PromptTooLong(before + error.tokens, exact=True) from None
        highest = max(ids, default=0)
        if highest >= self._vocab_size:  # such an id would end the engine's process
            reason = f"token {highest} is outside of the model's vocabulary ({self._vocab_size})"
            raise SessionError(reason, status=400, code="invalid_messages")
        return ids

    def _encode_behind(
        self, path: Sequence[int], text: str, room: Room | None
    ) -> list[int]:
        """Return the ids of a text that follows the path. The token that ends a turn
        may include the whitespace after it (Phi-3's does), so the text is tokenized
        together with it."""
        if not self.is_closed(path):
            return self.encode(text, room, before=len(path), inside=True)
        return self.encode(self.end_of_turn + text, room, before=len(path) - 1)[1:]

    def _check_min_tokens(self, text: str, max_ids: int, before: int) -> None:
        """Raise PromptTooLong if a large text certainly has more than `max_ids`
        tokens."""
        if len(text) < LARGE_TEXT:
            return
        min_tokens = self._tokenizer.min_tokens(text)
        if min_tokens > max_ids:
            raise PromptTooLong(before + min_tokens, exact=False)

    def without_thinking(self, text: str) -> str:
        """Remove thinking and all whitespace from a rendered text."""
        return without_thinking(text, self.end_of_turn)

    def _recorded_end(self, full: str, recorded: str) -> int | None:
        """Return where the recorded messages end in the rendering of all messages,
        which is before the end of their last turn; None if the full rendering differs
        from them."""
        mark = self.end_of_turn or self.after_reply
        if full.startswith(recorded + mark):
            return len(recorded)
        if not mark:
            return None
        num_earlier_ends = recorded.count(mark)
        end = _find_nth(full, mark, num_earlier_ends + 1)
        if end < 0:
            return None
        if not equal_without_thinking(full[:end], recorded, self.end_of_turn):
            return None
        return end

    def _follows(self, asked: str, answered: str) -> bool:
        """Whether a rendered reply follows its own prompt, ignoring thinking that the
        prompt opens."""
        prompt = self.without_thinking(asked)
        prompt = prompt.removesuffix(THINK)
        prompt = prompt.removesuffix(END_THINK)
        conversation = self.without_thinking(answered)
        return conversation.startswith(prompt)

    def _removed_thinking(
        self,
        path: Sequence[int],
        messages: Sequence[Message],
        rendered: str,
    ) -> int:
        """Count the ids of the path's thinking that are missing in `rendered`, the
        template's rendering of the path's messages.

        A thought that the template keeps has its two marks in the path and in the
        rendering. The marks are therefore counted in both, and the path's surplus is
        the number of removed thoughts. The larger of the two differences counts: a
        thought may lack one of its marks in the path (it was cut short, or the prompt
        had opened it). Which thoughts were removed follows from how templates work:
        they keep the thinking after the last question, and remove the oldest first.
        """
        if self._thinking_ids is None:
            return self._removed_thinking_text(path, messages, rendered)
        open_id, close_id = self._thinking_ids
        missing_opens = path.count(open_id) - rendered.count(THINK)
        missing_closes = path.count(close_id) - rendered.count(END_THINK)
        missing = max(missing_opens, missing_closes)
        if missing <= 0:
            return 0
        removed = 0
        opens = [
            position for position, token_id in enumerate(path) if token_id == open_id
        ]
        for begin in opens[:missing]:
            removed += _thought_length(path, begin, close_id)
        # The length of a thought without a beginning is unknown, but it has at least
        # the id of its end mark. The result must not be 0, which would say that the
        # template removes nothing.
        return max(removed, missing)

    def _removed_thinking_text(
        self,
        path: Sequence[int],
        messages: Sequence[Message],
        rendered: str,
    ) -> int:
        """Count ids like `_removed_thinking`, for a tokenizer whose marks of thinking
        are not single tokens."""
        thoughts = [_message_thinking(message) for message in messages]
        if not any(thoughts):
            return 0
        recorded = self.decode(path)
        removed = 0
        for thought in thoughts:
            if thought in recorded and thought not in without_marks(rendered):
                removed += len(self._tokenizer.encode(thought))
        return removed

    def _renders_replies_behind_prompts(self, *messages: Message) -> bool:
        """Whether the template accepts such a conversation and renders each reply after
        its own prompt."""
        try:
            for position, message in enumerate(messages):
                if message.role != "assistant":
                    continue
                prompt = Prompt(messages=messages[:position])
                conversation = Prompt(messages=messages[: position + 1])
                asked = self.text(prompt)
                answered = self.text(conversation, add_generation_prompt=False)
                if not self._follows(asked, answered):
                    return False
        except SessionError:
            return False
        return True

    def _find_thinking_ids(self) -> tuple[int, int] | None:
        """Return the tokens that begin and end thinking; None if one of the marks is
        more than one token."""
        open_ids = self._tokenizer.encode(THINK)
        close_ids = self._tokenizer.encode(END_THINK)
        if len(open_ids) != 1 or len(close_ids) != 1:
            return None
        return open_ids[0], close_ids[0]

    def _find_turn_end(self) -> _TurnEnd:
        reply = Message("assistant", _PROBE)
        probe = Prompt(messages=(_PROBE_QUESTION, reply))
        text = self.text(probe, add_generation_prompt=False)
        end_of_reply = text.rfind(_PROBE) + len(_PROBE)
        after_reply = text[end_of_reply:]
        first_ids = self._tokenizer.encode(after_reply)[:1]
        # A token that has a text without special tokens is not special.
        if not first_ids or self._tokenizer.decode(first_ids, special=False):
            return _TurnEnd(after_reply=after_reply)
        token = self._shortest_beginning(after_reply, first_ids)
        return _TurnEnd(after_reply=after_reply, token=token, token_id=first_ids[0])

    def _shortest_beginning(self, text: str, ids: Sequence[int]) -> str:
        for length in range(1, len(text) + 1):
            beginning = text[:length]
            if self._tokenizer.encode(beginning) == ids:
                return beginning
        raise ValueError(f"the tokenizer gives no beginning of {text!r} the ids {ids}")


def _refusal(error: Exception) -> SessionError:
    """Return the error for a template's exception."""
    reason = f"the model's chat template refuses this conversation: {error}"
    return SessionError(reason, status=400, code="invalid_messages")


def _message_thinking(message: Message) -> str:
    """Return the thinking of a message; some clients send it as a part of the
    content."""
    if message.reasoning:
        return message.reasoning
    thought, _, _ = message.content.rpartition(END_THINK)
    return thought


def _thought_length(path: Sequence[int], begin: int, close_id: int) -> int:
    """Count the ids of the thought that begins there, marks included, up to the path's
    end if it has no end mark."""
    try:
        end = path.index(close_id, begin)
    except ValueError:
        return len(path) - begin
    return end - begin + 1


def _find_nth(text: str, part: str, count: int) -> int:
    """Return where `part` begins for the `count`-th time; -1 if it occurs less
    often."""
    position = -1
    for _ in range(count):
        position = text.find(part, position + 1)
        if position < 0:
            break
    return position
