"""What was said in a rollout, as its turns were recorded: who asked what, and what the model replied.

Read from the messages that the gateway keeps beside each turn's tokens. A turn holds only the messages that
it adds to the one that it goes on from; one that begins or leaves a conversation holds all of them."""

from dataclasses import dataclass

import msgspec

from invrl.gateway.types import Message
from invrl.store.run_store import RunStore
from invrl.types import FinishReason, Turn, WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidTurn:
    """One reply of the model and the messages before it."""

    turn_id: str
    session_id: str
    """The rollout's, or that of a sub-agent of it."""
    prompt: tuple[Message, ...]
    reply: Message
    finish_reason: FinishReason
    sampled_tokens: int
    oldest_version: WeightVersion
    newest_version: WeightVersion
    delivered: bool
    fork_reason: str
    """Why it departs from what was recorded before; "" for a first turn and for one that goes on."""
    finished_at: float

    @property
    def cut(self) -> bool:
        """It ran out of tokens."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """All turns of a rollout, its sub-agents' among them, in the order in which they ended."""

    turns: tuple[SaidTurn, ...]

    @property
    def opening(self) -> tuple[Message, ...]:
        """What the model was asked first."""
        return self.turns[0].prompt if self.turns else ()

    @property
    def replies(self) -> str:
        """Everything that the model said, as one text."""
        return "\n".join(said(turn.reply) for turn in self.turns)


def read_transcript(store: RunStore, session_id: str) -> Transcript:
    """Of a session and its children; without turns where it has none, or is unknown."""
    turns: list[SaidTurn] = []
    for member in store.family(session_id):
        for turn, messages, _ in store.recorded_turns(member):
            *prompt, reply = msgspec.json.decode(messages, type=list[Message]) or [Message("assistant")]
            turns.append(_said_turn(turn, tuple(prompt), reply))
    return Transcript(turns=tuple(sorted(turns, key=lambda turn: turn.finished_at)))


def said(message: Message) -> str:
    """A message as text: its thinking, its content, its calls."""
    parts = [f"<think>{message.reasoning}</think>"] if message.reasoning else []
    parts += [message.content] if message.content else []
    parts += [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return "\n".join(parts)


def _said_turn(turn: Turn, prompt: tuple[Message, ...], reply: Message) -> SaidTurn:
    versions = [span.version for span in turn.spans if span.end > span.start]
    return SaidTurn(
        turn_id=turn.id,
        session_id=turn.session_id,
        prompt=prompt,
        reply=reply,
        finish_reason=turn.finish_reason,
        sampled_tokens=len(turn.sampled_ids_T),
        oldest_version=WeightVersion(min(versions, default=0)),
        newest_version=WeightVersion(max(versions, default=0)),
        delivered=turn.delivered,
        fork_reason=turn.fork_reason,
        finished_at=turn.finished_at,
    )
