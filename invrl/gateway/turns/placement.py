"""Placement of a request in the forest, and the token ids of its prompt: matched, then
rendered. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from invrl.errors import SessionError
from invrl.gateway.rendering.prompt_room import PromptTooLong, Room
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.turns.conversation import Conversation
from invrl.gateway.types import Change, ForkReason, Message, Node, Prompt, TurnRequest
from invrl.types.sessions import Sampling

CONTROL_TOKENS_AS_TEXT = "control_tokens_as_text"
"""Name of the count of control tokens in a request's new messages, which were rendered
as text."""
_ENGINE_MARGIN = 8
"""Tokens of the context length that SGLang reserves."""


class ContextExceeded(SessionError):
    """A prompt of `tokens` tokens, which are too many."""

    def __init__(self, reason: str, *, tokens: int) -> None:
        super().__init__(
            reason, status=400, code="context_length_exceeded", param="messages"
        )
        self.tokens = tokens


class Placement(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Place where a request continues the forest, and the ids that it adds there."""

    parent: Node | None
    depth: int
    """Messages of the prompt that the parent's conversation covers."""
    context_ids: list[int]
    input_ids_T: NDArray[np.int32]
    """Whole prompt: the ids of the path, then those of the context."""
    fork: ForkReason | None
    change: Change | None = None
    """Departure of the request from the recording."""
    prompt: Prompt
    counts: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Counts of the placement for the metrics; match levels have names that begin with
    `matches/`."""


class Placer:
    """Places requests, for prompts of up to `context_length` tokens."""

    def __init__(self, renderer: Renderer, context_length: int) -> None:
        self._renderer = renderer
        self._context_length = context_length
        self._max_prompt_tokens = context_length - _ENGINE_MARGIN - 1
        """Leaves room for one sampled token."""

    def place(
        self, conversation: Conversation, request: TurnRequest, *, exact: bool = False
    ) -> Placement:
        """Place a request. Raises SessionError 400 if it cannot be rendered or does not
        fit. `exact`: a prompt that does not fit is counted to its end, so that the
        error has the exact number of tokens."""
        room = Room(tokens=self._max_prompt_tokens, exact=exact)
        try:
            if request.text is not None:
                return self._place_text(conversation, request.text, room)
            return self._place_messages(conversation, request, room)
        except PromptTooLong as error:
            raise self._context_exceeded(error.tokens, exact=error.exact) from None

    def count_tokens(self, conversation: Conversation, request: TurnRequest) -> int:
        """Count the prompt tokens of this request, whether it fits or not."""
        try:
            placement = self.place(conversation, request, exact=True)
        except ContextExceeded as error:
            return error.tokens
        return len(placement.input_ids_T)

    def limit_new_tokens(self, sampling: Sampling, prompt_tokens: int) -> Sampling:
        """Return `sampling` with at most as many new tokens as fit after the prompt.
        Raises SessionError 400 if none do."""
        room = self._max_prompt_tokens + 1 - prompt_tokens
        if room < 1:
            raise self._context_exceeded(prompt_tokens, exact=True)
        return replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))

    def _place_messages(
        self, conversation: Conversation, request: TurnRequest, room: Room
    ) -> Placement:
        prompt = _full_prompt(conversation, request)
        match = conversation.forest.match(prompt.messages, prompt.tools)
        fork = match.fork
        change = match.change
        node = match.node
        if node is not None:
            recorded_prompt = replace(
                prompt, messages=(*node.conversation(), *match.new)
            )
            path_ids = node.ids()
            tail = self._renderer.render_tail(
                recorded_prompt, match.depth, path_ids, room
            )
            if tail.fork is None:
                counts = {f"matches/{match.level.name.lower()}": 1}
                counts |= self._control_token_counts(match.new)
                if tail.kept_thinking:
                    counts["thinking_kept"] = 1
                    counts["thinking_kept_tokens"] = tail.kept_thinking
                return Placement(
                    parent=node,
                    depth=match.depth,
                    context_ids=tail.ids,
                    input_ids_T=_concatenate(path_ids, tail.ids),
                    fork=fork,
                    change=change,
                    prompt=recorded_prompt,
                    counts=counts,
                )
            fork = tail.fork
            change = None
        ids = self._renderer.render_first(prompt, room)
        if fork is ForkReason.NEW_CONVERSATION and conversation.has_root(ids):
            fork = None  # another sample of a first turn is no fork
        counts = self._control_token_counts(prompt.messages)
        if fork is not None:
            counts["forked_tokens"] = len(ids)
        return Placement(
            parent=None,
            depth=0,
            context_ids=ids,
            input_ids_T=_concatenate([], ids),
            fork=fork,
            change=change,
            prompt=prompt,
            counts=counts,
        )

    def _control_token_counts(self, messages: Sequence[Message]) -> dict[str, int]:
        count = self._renderer.num_control_tokens(messages)
        return {CONTROL_TOKENS_AS_TEXT: count} if count else {}

    def _place_text(
        self, conversation: Conversation, text: str | tuple[int, ...], room: Room
    ) -> Placement:
        """Place a prompt without a template: it continues the longest recorded text
        that it begins with."""
        forest = conversation.forest
        decode = partial(self._renderer.decode, inside=True)
        node, covered = forest.match_text(text, decode)
        path_ids: list[int] = []
        if node is not None:
            path_ids = node.ids()
        new_text = text[covered:]
        if isinstance(new_text, str):
            ids = self._renderer.render_text(new_text, room, path=path_ids)
            message = Message("text", new_text)
        elif len(text) > room.tokens:
            raise PromptTooLong(len(text), exact=True)
        else:
            ids = list(new_text)
            message = Message("text", self._renderer.decode(ids))
        fork = None
        if forest.interrupted_text(text, decode) > covered:
            fork = ForkReason.INTERRUPTED_REPLY
        elif forest.size > 0 and node is None and not conversation.has_root(ids):
            fork = ForkReason.NEW_CONVERSATION
        return Placement(
            parent=node,
            depth=0,
            context_ids=ids,
            input_ids_T=_concatenate(path_ids, ids),
            fork=fork,
            prompt=Prompt(messages=(message,)),
        )

    def _context_exceeded(self, tokens: int, *, exact: bool) -> ContextExceeded:
        count = str(tokens) if exact else f"at least {tokens}"
        reason = (
            f"This model's maximum context length is {self._context_length} tokens (of which "
            f"{_ENGINE_MARGIN} are the engine's); your messages resulted in {count} tokens."
        )
        return ContextExceeded(reason, tokens=tokens)


def _full_prompt(conversation: Conversation, request: TurnRequest) -> Prompt:
    """Return the request's prompt, with the conversation that the request continues by
    its id. Raises SessionError 400 if that is no whole turn of this session."""
    messages = request.messages
    if request.after:
        node = conversation.forest.turn(request.after)
        if node is None or node.raw:
            reason = f"the previous response {request.after!r} is not of this session, or was not whole"
            raise SessionError(
                reason,
                status=400,
                code="previous_response_not_found",
                param="previous_response_id",
            )
        earlier = [
            message for message in node.conversation() if not message.instructions
        ]
        messages = (*earlier, *messages)
    if request.instructions is not None:
        messages = (
            Message("system", request.instructions, instructions=True),
            *messages,
        )
    return Prompt(messages=messages, tools=request.tools, thinking=request.thinking)


def _concatenate(
    path_ids: Sequence[int], context_ids: Sequence[int]
) -> NDArray[np.int32]:
    """Concatenate ids. (numpy takes twice as long as `array` to read a list.)"""
    return np.array(array("i", [*path_ids, *context_ids]), np.int32)
