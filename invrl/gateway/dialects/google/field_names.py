"""Names of the fields of Google's API, which takes `generation_config` as well as
`generationConfig`, as every JSON of a protocol buffer does. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import msgspec

from invrl.gateway.dialects import wire

Level = Mapping[str, "Level"]
"""Fields of an object, in camel case, that hold objects of the API, or lists of them.
The contents of all other fields (arguments, results, schemas) are the client's own."""
_CONTENT: Level = {"parts": {"functionCall": {}, "functionResponse": {}}}
_REQUEST: Level = {
    "contents": _CONTENT,
    "systemInstruction": _CONTENT,
    "tools": {"functionDeclarations": {}},
    "toolConfig": {"functionCallingConfig": {}},
    "generationConfig": {"thinkingConfig": {}},
}
_BODY: Level = {**_REQUEST, "generateContentRequest": _REQUEST}
_SNAKE_CASE = re.compile(rb'"[a-z]+(?:_[a-z]+)+"\s*:')
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


def with_camel_case(raw: bytes, known: Collection[str]) -> bytes:
    """Return the body of a request with the names of its fields in camel case, if that
    is one of the `known` names. A body that is not JSON is returned as it is."""
    if not _SNAKE_CASE.search(raw):
        return raw
    wire.check_number_of_values(raw, "the body")
    try:
        return _renamed(raw.strip(), _BODY, known)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw


def camel_case(name: str) -> str:
    """Return the name in camel case: `top_p` becomes `topP`."""
    first, *words = name.split("_")
    return first + "".join(word.capitalize() for word in words)


def _renamed(raw: bytes, level: Level, known: Collection[str]) -> bytes:
    if raw.startswith(b"["):
        values = [_renamed(bytes(value), level, known) for value in _LIST.decode(raw)]
        return b"[" + b",".join(values) + b"]"
    if not raw.startswith(b"{"):
        return raw
    fields = {}
    for sent_name, value in _OBJECT.decode(raw).items():
        name = camel_case(sent_name)
        if name not in known:
            name = sent_name
        if name in level:
            value = msgspec.Raw(_renamed(bytes(value), level[name], known))
        fields[name] = value
    return msgspec.json.encode(fields)
