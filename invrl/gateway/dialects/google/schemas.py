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


def as_json_schema(raw: msgspec.Raw, param: str) -> msgspec.Raw:
    """Return a schema whose types are `OBJECT`, `STRING`, ... as a JSON schema.
    `nullable` becomes a second type. Raises SessionError 400 for anything but an
    object."""
    text = wire.json_schema(raw, param)
    if not text:
        return wire.NO_JSON
    schema = _converted(msgspec.json.decode(text))
    return msgspec.Raw(msgspec.json.encode(schema))


def _converted(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    converted: dict[str, Any] = {}
    for sent_name, value in schema.items():
        name = camel_case(sent_name)
        if name not in _DROPPED:
            converted[name] = _converted_field(name, value)
    if converted.get("type") == "type_unspecified":
        del converted["type"]
    if schema.get("nullable") and "type" in converted:
        converted["type"] = [converted["type"], "null"]
    return converted


def _converted_field(name: str, value: Any) -> Any:
    if name == "type" and isinstance(value, str):
        return value.lower()
    if name == "properties" and isinstance(value, dict):
        return {property: _converted(schema) for property, schema in value.items()}
    if name == "items":
        return _converted(value)
    if name == "anyOf" and isinstance(value, list):
        return [_converted(schema) for schema in value]
    if name in _BOUNDS and isinstance(value, str) and value.isdecimal():
        return int(value)
    return value
