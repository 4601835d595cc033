"""Conversion of a conversation to trained tokens: one trajectory, or several where the
template rewrites its history.

Each trained reply follows exactly the tokens that the gateway would send to an engine
for it, and is what the template writes there, with the token that ends the turn. So a
model that was trained here and is then served, or trained with rollouts, sees the same
ids.

    context     the ids of the prompt, with the beginning of the reply    not trained
    reply       the ids of its text, and the end of the turn              trained
    context     what the template writes between this reply and the next  not trained
    ...

A trajectory continues as long as the renderer continues it
(`gateway/rendering/renderer.py`). Where it does not (the template drops earlier
thinking and `keep_thinking` is off, or it rewrites earlier replies), the next reply
begins a new trajectory, with its whole history as context. A rollout forks in the same
way.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from invrl.datasets.rows import Dialogue
from invrl.errors import SessionError, UnusableRowError
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizedTrajectory:
    """Tokens, and a mask of the trained ones: both [T]."""

    tokens_T: NDArray[np.int32]
    trained_T: NDArray[np.bool_]


def stretches(trained_T: NDArray[np.bool_]) -> Iterator[slice]:
    """Yield the places of neighbouring tokens that are all trained, or all context."""
    changes = np.flatnonzero(np.diff(trained_T.astype(np.int8))) + 1
    yield from map(slice, [0, *changes.tolist()], [*changes.tolist(), len(trained_T)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """A reply as text: what comes before it, and the reply up to the end of its
    turn."""

    before: str
    text: str
    follows_prompt: bool
    """Whether the text before it is the prompt that the gateway would send."""


def trajectories(renderer: Renderer, dialogue: Dialogue) -> list[TokenizedTrajectory]:
    """Convert a conversation to at least one trajectory. Raises UnusableRowError if the
    template refuses the conversation, or writes a reply in another way than it asks for
    it."""
    try:
        return _trajectories(renderer, dialogue)
    except SessionError as error:
        fix = "leave the row out, or choose another template with --chat-template-path"
        raise UnusableRowError(error.message, fix) from error


def _trajectories(renderer: Renderer, dialogue: Dialogue) -> list[TokenizedTrajectory]:
    made: list[TokenizedTrajectory] = []
    path: list[int] = []
    replies: list[tuple[int, int]] = []
    depth = 0
    for place in dialogue.trained:
        request = replace(dialogue.prompt, messages=dialogue.prompt.messages[:place])
        reply = _find_reply(renderer, dialogue.prompt, place)
        tail = None
        if path and reply.follows_prompt:
            tail = renderer.render_tail(request, depth, path)
        if tail is not None and tail.fork is None:
            path += tail.ids
        else:
            if path:
                made.append(_trajectory(path, replies))
            path = renderer.encode(reply.before)
            replies = []
        begin = len(path)
        path += renderer.encode_after(reply.before, reply.text)
        replies.append((begin, len(path)))
        depth = place + 1
    made.append(_trajectory(path, replies))
    return made


def _find_reply(renderer: Renderer, prompt: Prompt, place: int) -> _Reply:
    """Return the message at this position, as the template writes it when it comes
    last: the part that the template marks as generated, if it does; otherwise the part
    after the prompt."""
    asked = renderer.text(replace(prompt, messages=prompt.messages[:place]))
    conversation = replace(prompt, messages=prompt.messages[: place + 1])
    answered = renderer.text(conversation, add_generation_prompt=False)
    marked = renderer.last_marked_reply(conversation)
    if marked is not None:
        begin, end = marked
        text = answered[begin:end]
        if not text.endswith(renderer.after_reply) and answered.startswith(
            renderer.end_of_turn, end
        ):
            text += renderer.end_of_turn
        text = _up_to_end_of_turn(renderer, text)
        return _Reply(
            before=answered[:begin], text=text, follows_prompt=answered[:begin] == asked
        )
    fix = "leave the row out, or choose another template with --chat-template-path"
    if not answered.startswith(asked):
        reason = (
            f"message {place} (from 0) is written by the chat template in another way than it asks for "
            "such a reply"
        )
        if asked.rstrip().endswith("<think>"):
            fix = f"give the message its `reasoning_content`, which the template asks for; or {fix}"
        raise UnusableRowError(reason, fix)
    if not answered.endswith(renderer.after_reply) or not renderer.end_of_turn:
        reason = f"the chat template writes no token that ends message {place} (from 0)"
        raise UnusableRowError(reason, fix)
    text = _up_to_end_of_turn(renderer, answered.removeprefix(asked))
    return _Reply(before=asked, text=text, follows_prompt=True)


def _up_to_end_of_turn(renderer: Renderer, text: str) -> str:
    """Cut what the template writes after the token that ends the turn."""
    if not text.endswith(renderer.after_reply):
        return text
    return text.removesuffix(renderer.after_reply) + renderer.end_of_turn


def _trajectory(path: list[int], replies: list[tuple[int, int]]) -> TokenizedTrajectory:
    trained_T = np.zeros(len(path), np.bool_)
    for begin, end in replies:
        trained_T[begin:end] = True
    # Nothing predicts the first token.
    trained_T[:1] = False
    return TokenizedTrajectory(tokens_T=np.array(path, np.int32), trained_T=trained_T)
