"""Types shared by the gateway's packages, in pipeline order: a client's request, its
place in the session's forest, the engine's output on the way back. All of them are
frozen.

A dialect turns a body into a `TurnRequest`. The forest finds the `Node` that the
request continues, or the `ForkReason` that it continues none. Sampling yields `Piece`s,
and a committed turn yields an `Answer`, which the dialect writes. This module starts no
event loop, no thread and no process, so that dialects and rendering, which import it,
stay pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from invrl.types.turns import Turn

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model made it; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message as the chat template sees it. `role` is system, user, assistant or
    tool; it is `text` for a prompt that no template wraps (completions)."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Set on a tool's result: the id of the call that it answers."""
    instructions: bool = False
    """Whether the message applies to one request only: a request that continues this
    one does not inherit it."""

    @property
    def characters(self) -> int:
        """Number of characters of all texts in the message."""
        in_calls = sum(len(call.name) + len(call.arguments) for call in self.tool_calls)
        return len(self.content) + len(self.reasoning) + in_calls


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: str = ""
    """A JSON schema as text; "" for a function without parameters."""
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether the model may, must or must not call a tool. `name` is set if `mode` is
    "named"."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""
    allowed: tuple[str, ...] = ()
    """Names of the tools that may be called, out of those in the prompt; empty: all of
    them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Everything that the chat template renders. `thinking` is True if the client asked
    for it, False if it refused it, None for the template's default."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = None

    @property
    def characters(self) -> int:
        """Number of characters of all texts in the prompt."""
        in_tools = sum(
            len(tool.description) + len(tool.parameters) for tool in self.tools
        )
        return in_tools + sum(message.characters for message in self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSampling:
    """Sampling parameters of a client's request; None for those that it did not set.
    The names are SGLang's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    sampling_seed: int | None = None
    max_new_tokens: int | None = None


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request for one turn, the same for every dialect."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = msgspec.field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    top_logprobs: int = 0
    """Number of the likeliest tokens shown at each position."""
    schema: str = ""
    """JSON schema that the reply must follow; "" for none."""
    thinking: bool | None = None
    """See `Prompt`."""
    after: str = ""
    """Id of the turn that this request continues: the conversation of that turn comes
    before `messages`."""
    instructions: str | None = None
    """System message for this request only. It comes before everything else."""
    text: str | tuple[int, ...] | None = None
    """Prompt that no template wraps (completions), or its token ids; `messages` is then
    empty."""
    sampling: ClientSampling
    stop: tuple[str, ...]
    stream: bool
    model: str | None = None
    """Model that the client names; None if it names none."""
    digest: str
    """Digest of the body; a retry of the request has the same one."""
    retry: bool
    """Whether the client says that it has sent this request before."""
    ignored: tuple[str, ...] = ()


class MatchLevel(IntEnum):
    """Required equality of a message and the recorded one. Each level allows what the
    previous ones allow, and more."""

    EXACT = 0
    """Every character must be equal."""
    CANONICAL = 1
    """Whitespace around texts, the layout of JSON arguments, and tool-call ids may
    differ, but a result must still answer the same call. A missing argument equals the
    default in the tool's schema."""
    WITHOUT_REASONING = 2
    """Reasoning may be missing or altered."""
    REWRITTEN = 3
    """A reply with tool calls is identified by the ids and names of its calls; their
    arguments and the text beside them may differ. That text may stand in another
    message, and each of the calls, unaltered, in one of its own. In a reply without
    calls, whitespace may differ, objects may be written as JSON or as Python, and the
    stop string that ended it may follow."""


class ForkReason(StrEnum):
    """Reason that a request does not continue the recording."""

    NEW_CONVERSATION = "new_conversation"
    """Request shares no sampled reply with an earlier one: an auxiliary call, or a
    parallel conversation."""
    HISTORY_EDITED = "history_edited"
    """Request has another text instead of a recorded reply."""
    CONTEXT_EDITED = "context_edited"
    """Request has recorded replies, but one of the client's own messages before them
    was changed."""
    TEXT_MOVED = "text_moved"
    """Request has a text that accompanied a call in another message."""
    INTERRUPTED_REPLY = "interrupted_reply"
    """Request has a reply, or the beginning of one, that did not end: it was cancelled,
    it was out of tokens, or it did not reach the client whole."""
    COMPACTED = "compacted"
    """Request has a recorded reply, but fewer messages before it than were recorded."""
    HANDOFF = "handoff"
    """Request has recorded replies under another system prompt: another agent continues
    the conversation."""
    TOOLS_CHANGED = "tools_changed"
    """Request has the same conversation with other tools, which the template shows at
    its beginning."""
    THINKING_STRIPPED = "thinking_stripped"
    """The template drops earlier thinking from the history, and the run follows the
    template."""
    TEMPLATE_CHANGED = "template_changed"
    """The template renders the recorded messages differently once other messages follow
    them."""


ADVICE: Mapping[ForkReason, str] = {
    ForkReason.NEW_CONVERSATION: "expected of title, summary and sub-agent calls, and of programs whose every"
    " call is a conversation of its own; to keep a sub-agent's reward apart, open a child session",
    ForkReason.HISTORY_EDITED: "let the agent send replies back as it got them",
    ForkReason.CONTEXT_EDITED: "let the agent leave earlier messages as they were, and tell what changes (the"
    " time, a status) in its newest message",
    ForkReason.TEXT_MOVED: "expected of agents that keep the text beside a call in a message of its own",
    ForkReason.INTERRUPTED_REPLY: "expected of agents that keep what they have of an interrupted reply",
    ForkReason.COMPACTED: "expected of agents that shorten their history",
    ForkReason.HANDOFF: "expected of agents that hand a conversation over to each other",
    ForkReason.TOOLS_CHANGED: "offer the same tools in the same order in every request of a conversation",
    ForkReason.THINKING_STRIPPED: "set --keep-thinking to continue with the thinking that was sampled",
    ForkReason.TEMPLATE_CHANGED: "`invrl check-template MODEL` tells which messages the template re-writes",
}
"""Remedy for a fork, by its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """First difference between a request and the recording."""

    message: int
    role: str
    part: str
    """Part of the message that differs: content, reasoning, tool_calls, tool_call_ids,
    tool_call_id or role; `messages` if messages were removed or inserted; `tools` if
    the request offers other tools."""
    recorded: str
    """Excerpt of the recorded text, around the first character that differs."""
    sent: str
    """Excerpt of the request's text, around the same character."""
    level: MatchLevel | None = None
    """Lowest level above the session's at which the two messages count as the same;
    None if there is no such level."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """A recorded turn in the session's forest."""

    turn: Turn
    parent: Node | None
    messages: tuple[Message, ...]
    """Messages that the turn adds: the request's new ones, then the reply as it was
    returned."""
    closed: bool
    """Whether the sampled ids end with the template's own end-of-turn token."""
    tools: tuple[Tool, ...] = ()
    """Tools that the beginning of the path was rendered with."""
    stop: str = ""
    """Client's stop string that ended the reply, which its text does not show; "" if
    none did."""

    @property
    def raw(self) -> bool:
        """Whether no template rendered the prompt (completions): the first message is a
        piece of text."""
        return self.messages[0].role == "text"

    def path(self) -> list[Node]:
        """Return the nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def conversation(self) -> list[Message]:
        """Return the messages of the whole path."""
        return [message for node in self.path() for message in node.messages]

    def ids(self) -> list[int]:
        """Return exactly the token ids that the engine consumed and emitted along the
        path."""
        ids: list[int] = []
        for node in self.path():
            ids.extend(node.turn.context_ids_T.tolist())
            ids.extend(node.turn.sampled_ids_T.tolist())
        return ids


class ResponseStart(msgspec.Struct, frozen=True, kw_only=True):
    """Data of an answer before its first token."""

    turn_id: str
    created: float
    prompt_tokens: int


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Addition of a piece to call number `index` of the reply. Only the first piece of
    a call has `id` and `name`."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Addition of a piece of text to the reply, in this order: reasoning, content,
    calls."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    @classmethod
    def of_reply(cls, reply: Message) -> Delta:
        """Return a whole reply as it was parsed when sampled. Parsed again, in other
        pieces, the same text might give another result."""
        calls = tuple(
            CallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments)
            for index, call in enumerate(reply.tool_calls)
        )
        return cls(content=reply.content, reasoning=reply.reasoning, calls=calls)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Piece(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Addition of one chunk of the engine's output to the answer."""

    delta: Delta
    ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    top: NDArray[np.void] = msgspec.field(default_factory=lambda: np.empty(0, np.void))
    """Likeliest tokens of every position (id, log-prob), one position after the other,
    each with equally many; empty if the client did not ask for them. They are shown to
    the client and never recorded."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A committed turn, ready for a dialect to write."""

    turn: Turn
    message: Message
    """Reply, parsed into reasoning, content and calls."""
    pieces: tuple[Piece, ...]
    stop: str = ""
    """Client's stop string that ended the reply; "" if none did."""

    @classmethod
    def recorded(cls, node: Node) -> Answer:
        """Return the answer of a recorded turn, in one piece."""
        turn = node.turn
        reply = node.messages[-1]
        piece = Piece(
            delta=Delta.of_reply(reply),
            ids_T=turn.sampled_ids_T,
            logprobs_T=turn.logprobs_T,
        )
        return cls(turn=turn, message=reply, pieces=(piece,), stop=node.stop)
