"""Explains why a body is not JSON text, in terms that a client's author can act on.
Pure."""

import codecs
import re

import msgspec

from invrl.errors import SessionError

_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*"  # an even number of backslashes before the escape
    rb"(?P<escape>\\u(?:[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[dD][c-fC-F][0-9a-fA-F]{2}))"
)
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_ENCODED_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
_SURROGATE_REASON = "a lone surrogate, half of a UTF-16 pair, is no character"


def not_json(
    raw: bytes, error: msgspec.DecodeError | UnicodeDecodeError
) -> SessionError:
    """Return SessionError 400 for a body that is not UTF-8, or not JSON. `error` is its
    decoder's exception."""
    if not raw.strip():
        return _invalid("it is empty")
    if isinstance(error, UnicodeDecodeError):
        return _invalid(_encoding_reason(raw, error))
    if raw.startswith(codecs.BOM_UTF8):
        return _invalid("it begins with a byte order mark")
    # A pair is no lone surrogate: blanks of the same length keep the places of what
    # follows.
    escape = _LONE_SURROGATE.search(_PAIR.sub(b" " * 12, raw))
    if escape is not None:
        return _invalid(f"{_SURROGATE_REASON} (byte {escape.start('escape')})")
    reason = str(error).removeprefix("JSON is malformed: ")
    if reason == "Input data was truncated":
        reason = "it ends too early"
    return _invalid(reason)


def check_encoding(raw: bytes) -> None:
    """Raise SessionError 400 if the body is not UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise not_json(raw, error) from None


def invalid_json(reason: str, param: str | None = None) -> SessionError:
    return SessionError(reason, status=400, code="invalid_json", param=param)


def lone_surrogate(field: str) -> SessionError:
    """Return SessionError 400 for a text that a tolerant decoder has read."""
    return invalid_json(f"{field}: {_SURROGATE_REASON}", field)


def _invalid(reason: str) -> SessionError:
    return invalid_json(f"the body is not valid JSON: {reason}")


def _encoding_reason(raw: bytes, error: UnicodeDecodeError) -> str:
    reason = "it is not UTF-8"
    if _ENCODED_SURROGATE.match(raw, error.start):
        reason = _SURROGATE_REASON
    return f"{reason} (byte {error.start})"
