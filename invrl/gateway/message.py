"""What a conversation is made of, and when two messages count as the same. Pure.

Agents hand history back altered: without reasoning, with other tool-call ids, JSON keys in another order,
whitespace trimmed. `MatchLevel` names what may differ. Dialects make messages, `forest.py` compares them,
`rendering.py` shows them to the chat template."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the reply made it; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message as the chat template sees it. `role`: system, user, assistant or tool."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Of a tool's result: the call that it answers."""
    instructions: bool = False
    """Given for one request alone: a request that names this one's answer does not inherit it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    description: str = ""
    parameters: str = ""
    """A JSON schema as text; "" for a function without any."""
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether the model must call. `name` where the choice is "named"."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """All that the chat template renders. `thinking`: asked for, refused, or None: the template's default."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = None


class MatchLevel(IntEnum):
    """How much of a message must be equal. Each level allows what the ones before it allow."""

    EXACT = 0
    """Every character."""
    CANONICAL = 1
    """Whitespace around texts, the layout of JSON arguments, and tool-call ids may differ: a result must
    still answer the same call."""
    WITHOUT_REASONING = 2
    """Reasoning may be missing or altered."""


def digests(
    messages: Sequence[Message],
    level: MatchLevel,
    seed: bytes = b"",
    *,
    earlier: int = 0,
    calls: Mapping[str, str] | None = None,
) -> list[bytes]:
    """One digest per prefix of the conversation, the empty one (`seed`) first. To go on from one: `seed` is
    its digest, `earlier` the messages that it has, `calls` the places of its tool calls that are answered."""
    digest = seed
    found = [digest]
    places = dict(calls or {})
    """Of tool-call ids so far."""
    for at, message in enumerate(messages, earlier):
        for nth, call in enumerate(message.tool_calls):
            places[call.id] = f"{at}.{nth}"
        parts = _parts(message, level, places)
        encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
        lengths = b",".join([b"%d" % len(part) for part in encoded])
        digest = hashlib.blake2b(b"".join([digest, lengths, b";", *encoded]), digest_size=16).digest()
        found.append(digest)
    return found


def tools_digest(tools: Sequence[Tool]) -> bytes:
    """Of what the tools are, whatever the order of their JSON's keys; b"" for none."""
    if not tools:
        return b""
    shown = [[tool.name, tool.description, canonical_json(tool.parameters)] for tool in tools]
    return hashlib.blake2b(json.dumps(shown).encode(), digest_size=16).digest()


def canonical_json(text: str) -> str:
    """JSON with sorted keys and one layout, 2.0 as the 2 that JavaScript makes of it; other text as it is."""
    try:
        return json.dumps(json.loads(text, parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return text.strip()


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _parts(message: Message, level: MatchLevel, calls: dict[str, str]) -> list[str]:
    if level is MatchLevel.EXACT:
        raw = [part for call in message.tool_calls for part in (call.id, call.name, call.arguments)]
        return [message.role, message.content, message.reasoning, message.tool_call_id, *raw]
    reasoning = message.reasoning.strip() if level is MatchLevel.CANONICAL else ""
    made = [part for call in message.tool_calls for part in (call.name, canonical_json(call.arguments))]
    answers = calls.get(message.tool_call_id, "")
    return [message.role, message.content.strip(), reasoning, answers, *made]
