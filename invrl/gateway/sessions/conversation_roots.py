"""Distinguishes the main conversation of a session from auxiliary ones, by their root
turns. Pure.

A root turn begins a conversation. The conversation with the most tokens delivered to
the client is the main one of its session; the others (titles, summaries, parallel
conversations) are auxiliary."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from invrl.gateway.types import ForkReason
from invrl.types.turns import Turn

_SHARED_BY_STEPS = 0.75
"""Part of the shorter prompt that two steps of one conversation share at their
beginning."""
_MAX_COMPARED = 16
"""Number of conversations with which a root is compared; the newest ones."""


def roots(turns: Sequence[Turn]) -> Mapping[str, str]:
    """Return the root of each turn, by turn id. Parents come before their children in
    `turns`."""
    root_of: dict[str, str] = {}
    for turn in turns:
        if turn.parent_id is None:
            root_of[turn.id] = turn.id
        else:
            root_of[turn.id] = root_of[turn.parent_id]
    return root_of


def auxiliary_roots(
    turns: Sequence[Turn], delivered: Collection[str]
) -> tuple[str, ...]:
    """Return the roots of all conversations except the main one of each session.

    Only the tokens of turns that were delivered whole count towards a conversation's
    size: aborted or abandoned turns say nothing about the agent's purpose. Roots with
    equal prompts are samples of one conversation, and roots whose prompts share most of
    their beginning are its steps: a program that renders its whole history into each
    prompt (DSPy's ReAct) begins a conversation with every step. A root that departed
    from the recording (edited history, stripped thinking) belongs to the conversation
    with which it shares the longest beginning.
    """
    root_of = roots(turns)
    delivered_tokens = Counter[str]()
    """Number of delivered tokens, by root."""
    for turn in turns:
        if turn.id in delivered and turn.finish_reason != "abort":
            delivered_tokens[root_of[turn.id]] += len(turn.sampled_ids_T)
    auxiliary: list[str] = []
    session_ids = dict.fromkeys(turn.session_id for turn in turns)
    for session_id in session_ids:
        root_turns = [
            turn
            for turn in turns
            if turn.session_id == session_id and turn.parent_id is None
        ]
        conversation_of = _conversations(root_turns)
        size = Counter[str]()
        for turn in root_turns:
            size[conversation_of[turn.id]] += delivered_tokens[turn.id]
        main = max(size, key=lambda first_root: size[first_root])
        auxiliary += [
            turn.id for turn in root_turns if conversation_of[turn.id] != main
        ]
    return tuple(auxiliary)


def _conversations(root_turns: Sequence[Turn]) -> Mapping[str, str]:
    """Return, for each root of one session, the id of the first root of its
    conversation."""
    beginnings = [
        turn
        for turn in root_turns
        if turn.fork_reason in ("", ForkReason.NEW_CONVERSATION)
    ]
    if not beginnings:
        beginnings = list(root_turns)
    first_by_prompt: dict[bytes, Turn] = {}
    conversation_of: dict[str, str] = {}
    for turn in beginnings:
        prompt = turn.context_ids_T.tobytes()
        if prompt not in first_by_prompt:
            first = _earlier_step(turn, list(first_by_prompt.values())[-_MAX_COMPARED:])
            if first is not None:
                conversation_of[turn.id] = first.id
                continue
        first = first_by_prompt.setdefault(prompt, turn)
        conversation_of[turn.id] = first.id
    for turn in root_turns:
        if turn.id not in conversation_of:
            shared_tokens = {
                first.id: _shared_tokens(first, turn)
                for first in first_by_prompt.values()
            }
            conversation_of[turn.id] = max(
                shared_tokens, key=lambda first_id: shared_tokens[first_id]
            )
    return conversation_of


def _earlier_step(turn: Turn, firsts: Sequence[Turn]) -> Turn | None:
    """Return the first root of the conversation that this root is a later step of; None
    if it begins another."""
    for first in firsts:
        shorter = min(len(first.context_ids_T), len(turn.context_ids_T))
        shared = _shared_tokens(first, turn)
        if shared and shared >= _SHARED_BY_STEPS * shorter:
            return first
    return None


def _shared_tokens(first: Turn, second: Turn) -> int:
    """Count the equal tokens at the beginning of both contexts."""
    length = min(len(first.context_ids_T), len(second.context_ids_T))
    differences = np.flatnonzero(
        first.context_ids_T[:length] != second.context_ids_T[:length]
    )
    if len(differences) == 0:
        return length
    return int(differences[0])
