"""When two messages count as the same: digests of conversations, one per `MatchLevel`. Pure.

Agents hand history back altered: without reasoning, with other tool-call ids, JSON keys in another order,
whitespace trimmed. `MatchLevel` names what may differ. Dialects make messages, `forest.py` compares them,
`rendering.py` shows them to the chat template."""

import ast
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence

from invrl.gateway.types import MatchLevel, Message, Tool
from invrl.types import Json


def digests(
    messages: Sequence[Message],
    level: MatchLevel,
    seed: bytes = b"",
    *,
    earlier: int = 0,
    calls: Mapping[str, str] | None = None,
    tools: Sequence[Tool] = (),
) -> list[bytes]:
    """One digest per prefix of the conversation, the empty one (`seed`) first. To go on from one: `seed` is
    its digest, `earlier` the messages that it has, `calls` the places of its tool calls that are answered.
    `tools`: whose schemas say what a missing argument is. That a reply is known by its calls' ids
    (`MatchLevel.REWRITTEN`) is not seen here: `forest.py` puts the recorded reply in its place first."""
    digest = seed
    found = [digest]
    places = dict(calls or {})
    """Of tool-call ids so far."""
    schemas = _schemas_with_defaults(tools) if level > MatchLevel.EXACT else {}
    for at, message in enumerate(messages, earlier):
        for nth, call in enumerate(message.tool_calls):
            places[call.id] = f"{at}.{nth}"
        parts = _parts(message, level, places, schemas)
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


def canonical_json(text: str, schema: Json = None) -> str:
    """JSON with sorted keys and one layout, 2.0 as the 2 that JavaScript makes of it; other text as it is.
    `schema`: a JSON schema, whose defaults stand for what is missing."""
    try:
        value = json.loads(text, parse_float=_number)
        if schema is not None:
            value = _with_defaults(value, schema, schema)
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return text.strip()


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _schemas_with_defaults(tools: Sequence[Tool]) -> Mapping[str, Json]:
    """The parameters of those tools that have a default anywhere, by the tool's name."""
    return {tool.name: _schema(tool.parameters) for tool in tools if '"default"' in tool.parameters}


@functools.lru_cache(maxsize=256)
def _schema(parameters: str) -> Json:
    try:
        return json.loads(parameters, parse_float=_number)
    except (ValueError, RecursionError):
        return None


def _with_defaults(value: Json, schema: Json, root: Json) -> Json:
    """`value` with the defaults of `schema` in the places of properties that it lacks, in nested objects and
    lists too. References within `root` are followed; alternatives (`anyOf`) are not chosen from."""
    if not isinstance(schema, dict):
        return value
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _with_defaults(value, _referred(reference, root), root)
    if isinstance(value, list):
        items = schema.get("items")
        return [_with_defaults(item, items, root) for item in value]
    properties = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(properties, dict):
        return value
    filled = dict(value)
    for name, described in properties.items():
        if name in filled:
            filled[name] = _with_defaults(filled[name], described, root)
        elif isinstance(described, dict) and "default" in described:
            filled[name] = described["default"]
    return filled


def _referred(reference: str, root: Json) -> Json:
    """What a reference such as `#/$defs/Point` stands for; None if it leads nowhere."""
    place, *names = reference.split("/")
    found = root if place == "#" else None
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _parts(
    message: Message, level: MatchLevel, calls: Mapping[str, str], schemas: Mapping[str, Json]
) -> list[str]:
    """The texts that make two messages the same at a level."""
    if level is MatchLevel.EXACT:
        raw = [part for call in message.tool_calls for part in (call.id, call.name, call.arguments)]
        return [message.role, message.content, message.reasoning, message.tool_call_id, *raw]
    content = message.content.strip()
    if level is MatchLevel.REWRITTEN and message.role == "assistant":
        content = _relaid(content)
    reasoning = message.reasoning.strip() if level is MatchLevel.CANONICAL else ""
    parts = [message.role, content, reasoning, calls.get(message.tool_call_id, "")]
    for call in message.tool_calls:
        parts += [call.name, canonical_json(call.arguments, schemas.get(call.name))]
    return parts


_MOST_OBJECTS = 16
_LONGEST_OBJECT = 4_000
"""Characters. Both bounds hold the time that a text of nothing but braces takes."""
_OBJECT_BEGINS = re.compile(r"""\{\s*["'}]""")
"""A brace and the first key, or the end. Other braces are code, and to parse each as Python takes long."""
_DECODER = json.JSONDecoder(parse_float=_number)


def _relaid(text: str) -> str:
    """`text` with each object in it, as JSON or as Python writes it, in one layout, and with one space
    wherever there is whitespace: agents that keep calls as text write them anew."""
    pieces: list[str] = []
    done = 0
    for _ in range(_MOST_OBJECTS):
        begin = text.find("{", done)
        if begin < 0:
            break
        end, shown = _object_at(text, begin)
        pieces += [text[done:begin], shown]
        done = end
    return " ".join("".join([*pieces, text[done:]]).split())


def _object_at(text: str, begin: int) -> tuple[int, str]:
    """Where the object that begins at `begin` ends, and the object in one layout; of no object the brace."""
    piece = text[begin : begin + _LONGEST_OBJECT]
    if not _OBJECT_BEGINS.match(piece):
        return begin + 1, "{"
    try:
        value, length = _DECODER.raw_decode(piece)
        return begin + length, json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        pass
    line = piece.partition("\n")[0].rstrip()  # Python's repr stands on one line
    if not line.endswith("}"):
        return begin + 1, "{"
    try:
        value = ast.literal_eval(line)
        return begin + len(line), json.dumps(value, sort_keys=True)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return begin + 1, "{"
