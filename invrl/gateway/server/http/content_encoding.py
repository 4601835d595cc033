"""Decompresses the body of a request, up to a limit. Pure.

Invariant: never decompresses more than the limit, whatever the size of the content.
"""

import zlib

from invrl.errors import SessionError

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Header that zlib expects, by the name of the encoding."""


def decompress(body: bytes, encoding: str, *, limit: int) -> bytes:
    """Decompress. `encoding` is the value of the Content-Encoding header. Raises
    SessionError 415 for an unknown encoding, 413 for more than `limit` bytes, 400 for a
    body that is not encoded so."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if name not in _WINDOW_BITS:
        reason = f"content-encoding {encoding!r} is not one of gzip, deflate, identity"
        raise SessionError(reason, status=415, code="unsupported_encoding")
    decompressor = zlib.decompressobj(_WINDOW_BITS[name])
    try:
        text = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise _bad_body(name, str(error)) from None
    if len(text) > limit:
        reason = (
            f"the request's body is larger than {limit} bytes when it is decompressed"
        )
        raise SessionError(reason, status=413, code="request_too_large")
    if not decompressor.eof:
        raise _bad_body(name, "it ends too early")
    if decompressor.unused_data:
        raise _bad_body(name, "more bytes follow its end")
    return text


def _bad_body(name: str, reason: str) -> SessionError:
    return SessionError(
        f"the body is not {name}: {reason}", status=400, code="invalid_encoding"
    )
