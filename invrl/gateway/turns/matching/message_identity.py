"""Identity of messages: digests of conversations, for each `MatchLevel`. Pure.

Agents send history back altered: without reasoning, with other tool-call ids, with the
keys of JSON in another order, with whitespace trimmed. A `MatchLevel` says which of
these differences are allowed. Two conversations are the same at a level if their
digests are equal.
"""

import ast
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence

from invrl.gateway.types import MatchLevel, Message, Tool
from invrl.types.tasks import Json

_MAX_OBJECTS = 16
"""Maximum number of rewritten objects in one text."""
_MAX_OBJECT_CHARACTERS = 4_000
"""The two bounds limit the time for a text full of braces."""
_OBJECT_BEGINS = re.compile(r"""\{\s*["'}]""")
"""A brace and the first key, or the end of the object. Any other brace is code: parsing
each of those as Python would take long."""


def digests(
    messages: Sequence[Message],
    level: MatchLevel,
    seed: bytes = b"",
    *,
    earlier: int = 0,
    calls: Mapping[str, str] | None = None,
    tools: Sequence[Tool] = (),
) -> list[bytes]:
    """Return one digest for each prefix of the conversation, starting with that of the
    empty one, which is `seed`.

    To continue a conversation: `seed` is its digest, `earlier` the number of its
    messages, `calls` has the places of those of its tool calls that `messages` answer.
    The schemas of `tools` say what a missing argument is. At `MatchLevel.REWRITTEN` a
    reply is identified by its calls; this function does not do that: the forest
    replaces the sent reply by the recorded one.
    """
    digest = seed
    prefix_digests = [digest]
    call_places = dict(calls or {})
    """Place of every tool call so far, by its id."""
    schemas: Mapping[str, Json] = {}
    if level > MatchLevel.EXACT:
        schemas = _schemas_with_defaults(tools)
    for position, message in enumerate(messages, earlier):
        for index, call in enumerate(message.tool_calls):
            call_places[call.id] = f"{position}.{index}"
        parts = _compared_parts(message, level, call_places, schemas)
        encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
        lengths = b",".join([b"%d" % len(part) for part in encoded])
        digest = hashlib.blake2b(
            b"".join([digest, lengths, b";", *encoded]), digest_size=16
        ).digest()
        prefix_digests.append(digest)
    return prefix_digests


def is_same_message(
    recorded: Message, sent: Message, level: MatchLevel, tools: Sequence[Tool]
) -> bool:
    """Whether two messages are the same at a level, whatever comes before them."""
    recorded_digests = digests([recorded], level, tools=tools)
    sent_digests = digests([sent], level, tools=tools)
    return recorded_digests == sent_digests


def tools_digest(tools: Sequence[Tool]) -> bytes:
    """Return the digest of the tools, which does not depend on the order of the keys in
    their JSON; b"" for none."""
    if not tools:
        return b""
    fields = [
        [tool.name, tool.description, canonical_json(tool.parameters)] for tool in tools
    ]
    return hashlib.blake2b(json.dumps(fields).encode(), digest_size=16).digest()


def canonical_json(text: str, schema: Json = None) -> str:
    """Return the JSON with sorted keys, in one layout, and with 2.0 written as 2, like
    JavaScript. Text that is not JSON is only stripped. `schema` is a JSON schema, whose
    defaults are filled in."""
    try:
        value = json.loads(text, parse_float=_parse_float)
        if schema is not None:
            value = _with_defaults(value, schema, schema)
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return text.strip()


def _parse_float(text: str) -> float:
    value = float(text)
    if value.is_integer():
        return int(value)
    return value


def _schemas_with_defaults(tools: Sequence[Tool]) -> Mapping[str, Json]:
    """Return the schemas of those tools that have a default somewhere, by the tool's
    name."""
    return {
        tool.name: _parse_schema(tool.parameters)
        for tool in tools
        if '"default"' in tool.parameters
    }


@functools.lru_cache(maxsize=256)
def _parse_schema(parameters: str) -> Json:
    try:
        return json.loads(parameters, parse_float=_parse_float)
    except (ValueError, RecursionError):
        return None


def _with_defaults(value: Json, schema: Json, root: Json) -> Json:
    """Fill in the schema's defaults for missing properties, also in nested objects and
    lists. References within `root` are followed; of alternatives (`anyOf`) none is
    chosen."""
    if not isinstance(schema, dict):
        return value
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _with_defaults(value, _resolve_reference(reference, root), root)
    if isinstance(value, list):
        items = schema.get("items")
        return [_with_defaults(item, items, root) for item in value]
    properties = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(properties, dict):
        return value
    filled = dict(value)
    for name, property_schema in properties.items():
        if name in filled:
            filled[name] = _with_defaults(filled[name], property_schema, root)
        elif isinstance(property_schema, dict) and "default" in property_schema:
            filled[name] = property_schema["default"]
    return filled


def _resolve_reference(reference: str, root: Json) -> Json:
    """Return the schema that a reference such as `#/$defs/Point` stands for; None if
    there is no such schema."""
    document, *names = reference.split("/")
    if document != "#":
        return None
    schema = root
    for name in names:
        if not isinstance(schema, dict):
            return None
        schema = schema.get(name)
    return schema


def _compared_parts(
    message: Message,
    level: MatchLevel,
    call_places: Mapping[str, str],
    schemas: Mapping[str, Json],
) -> list[str]:
    """Return the texts that must be equal for two messages to be the same at a
    level."""
    if level is MatchLevel.EXACT:
        parts = [message.role, message.content, message.reasoning, message.tool_call_id]
        for call in message.tool_calls:
            parts += [call.id, call.name, call.arguments]
        return parts
    content = message.content.strip()
    if level is MatchLevel.REWRITTEN and message.role == "assistant":
        content = _canonical_text(content)
    reasoning = ""
    if level is MatchLevel.CANONICAL:
        reasoning = message.reasoning.strip()
    parts = [
        message.role,
        content,
        reasoning,
        call_places.get(message.tool_call_id, ""),
    ]
    for call in message.tool_calls:
        parts += [call.name, canonical_json(call.arguments, schemas.get(call.name))]
    return parts


_DECODER = json.JSONDecoder(parse_float=_parse_float)


def _canonical_text(text: str) -> str:
    """Return the text with every object in it, written as JSON or as Python, in one
    layout, and with one space for any whitespace: agents that keep calls as text
    rewrite them."""
    pieces: list[str] = []
    end = 0
    for _ in range(_MAX_OBJECTS):
        begin = text.find("{", end)
        if begin < 0:
            break
        pieces.append(text[end:begin])
        end, canonical = _canonical_object(text, begin)
        pieces.append(canonical)
    pieces.append(text[end:])
    return " ".join("".join(pieces).split())


def _canonical_object(text: str, begin: int) -> tuple[int, str]:
    """Return the end of the object that begins at `begin`, and the object in one
    layout. If there is no object, the end of the brace and the brace."""
    no_object = (begin + 1, "{")
    candidate = text[begin : begin + _MAX_OBJECT_CHARACTERS]
    if not _OBJECT_BEGINS.match(candidate):
        return no_object
    try:
        value, length = _DECODER.raw_decode(candidate)
        return begin + length, json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        pass
    line = candidate.partition("\n")[0].rstrip()  # Python's repr is one line
    if not line.endswith("}"):
        return no_object
    try:
        value = ast.literal_eval(line)
        return begin + len(line), json.dumps(value, sort_keys=True)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return no_object
