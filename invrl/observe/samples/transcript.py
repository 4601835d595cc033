"""The transcript of a rollout: the messages that the agent sent, and the model's
replies.

Read from the messages that the gateway records with each turn's tokens. A turn records
only the messages that it adds to its parent: the turn that it continues, or the last
one that a fork shares with earlier turns. A turn without a parent records all of its
messages.
"""

from dataclasses import dataclass

import msgspec

from invrl.gateway.types import Message
from invrl.store.run_store import RunStore
from invrl.types.turns import FinishReason, Segment
from invrl.types.weights import WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptTurn:
    """One reply of the model, and the messages before it."""

    turn_id: str
    session_id: str
    """Session of the rollout, or of one of its sub-agents."""
    prompt: tuple[Message, ...]
    reply: Message
    finish_reason: FinishReason
    sampled_tokens: int
    oldest_version: WeightVersion
    newest_version: WeightVersion
    delivered: bool
    fork_reason: str
    """Reason that it forks off earlier turns; "" for a first turn and for one that
    continues another."""
    keeps_interrupted_reply: bool
    """Whether it continues a reply that ran out of tokens."""
    finished_at: float
    segments: tuple[Segment, ...]
    """Engines of a moved turn; empty if it was not moved."""


Transcript = tuple[TranscriptTurn, ...]
"""All turns of a rollout and its sub-agents, in the order in which they ended."""


def read_transcript(store: RunStore, session_id: str) -> Transcript:
    """Read the transcript of a session and its children. It is empty if the session has
    no turns or is unknown."""
    turns: list[TranscriptTurn] = []
    interrupted: set[str] = set()
    """Turns so far that ran out of tokens."""
    family = store.family(session_id)
    segments = store.turn_segments(*family)
    for turn, encoded_messages, _ in store.recorded_turns(*family):
        messages = msgspec.json.decode(encoded_messages, type=list[Message])
        if not messages:
            messages = [Message("assistant")]
        versions = [span.version for span in turn.spans if span.end > span.start]
        turns.append(
            TranscriptTurn(
                turn_id=turn.id,
                session_id=turn.session_id,
                prompt=tuple(messages[:-1]),
                reply=messages[-1],
                finish_reason=turn.finish_reason,
                sampled_tokens=len(turn.sampled_ids_T),
                oldest_version=WeightVersion(min(versions, default=0)),
                newest_version=WeightVersion(max(versions, default=0)),
                delivered=turn.delivered,
                fork_reason=turn.fork_reason,
                keeps_interrupted_reply=turn.parent_id in interrupted,
                finished_at=turn.finished_at,
                segments=segments.get(turn.id, ()),
            )
        )
        if turn.finish_reason != "stop":
            interrupted.add(turn.id)
    return tuple(turns)


def message_text(message: Message) -> str:
    """Return its thinking, its content and its tool calls as one text."""
    parts: list[str] = []
    if message.reasoning:
        parts.append(f"<think>{message.reasoning}</think>")
    if message.content:
        parts.append(message.content)
    for call in message.tool_calls:
        parts.append(f"{call.name}({call.arguments})")
    return "\n".join(parts)
