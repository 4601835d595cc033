"""Google's schemas, a dialect of OpenAPI's, as JSON schemas. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from invrl.gateway.dialects import wire
from invrl.gateway.dialects.google.field_names import camel_case

_BOUNDS = (
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minProperties",
    "maxProperties",
)
"""Fields whose numbers may be sent as text."""
_DROPPED = ("propertyOrdering", "nullable")
_RENAMED = {"defs": "$defs", "ref": "$ref"}
_SCHEMAS = ("items", "additionalProperties")
"""Fields that hold a schema."""
_LISTS = ("anyOf", "prefixItems")
"""Fields that hold a list of schemas."""
_MAPS = ("properties", "$defs")
"""Fields that hold schemas by name."""


def as_json_schema(raw: msgspec.Raw, param: str) -> msgspec.Raw:
    """Return a schema whose types are `OBJECT`, `STRING`, ... as a JSON schema.
    `nullable` becomes a further type. Raises SessionError 400 for anything but an
    object, and for one that is nested too deeply."""
    text = wire.json_schema(raw, param)
    if not text:
        return wire.NO_JSON
    try:
        schema = _converted(msgspec.json.decode(text))
    except RecursionError:
        reason = f"{param} is nested too deeply"
        raise wire.bad_request(reason, param=param) from None
    return msgspec.Raw(msgspec.json.encode(schema))


def _converted(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    converted: dict[str, Any] = {}
    for sent_name, value in schema.items():
        name = camel_case(sent_name)
        name = _RENAMED.get(name, name)
        if name not in _DROPPED:
            converted[name] = _converted_field(name, value)
    if converted.get("type") == "type_unspecified":
        del converted["type"]
    if schema.get("nullable"):
        _allow_null(converted)
    return converted


def _allow_null(schema: dict[str, Any]) -> None:
    """Let a JSON schema take null, too."""
    if isinstance(schema.get("anyOf"), list):
        schema["anyOf"].append({"type": "null"})
    elif "type" in schema:
        schema["type"] = [schema["type"], "null"]
    if isinstance(schema.get("enum"), list):
        schema["enum"] = [*schema["enum"], None]


def _converted_field(name: str, value: Any) -> Any:
    if name == "type" and isinstance(value, str):
        return value.lower()
    if name in _SCHEMAS:
        return _converted(value)
    if name in _LISTS and isinstance(value, list):
        return [_converted(schema) for schema in value]
    if name in _MAPS and isinstance(value, dict):
        return {key: _converted(schema) for key, schema in value.items()}
    if name in _BOUNDS and isinstance(value, str) and value.isdecimal():
        return int(value)
    return value
