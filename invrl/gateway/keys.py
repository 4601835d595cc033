"""Session keys and the environment key: how requests carry them, and how they are made,
hashed and checked.

A session key is `isk-`, the number of the worker that holds the session, random bits,
and a code by which every worker recognises keys of this gateway. Keys are stored as
hashes and compared in constant time.
"""

import base64
import hashlib
import hmac
from collections.abc import Mapping, Sequence

from invrl.errors import SessionError

KEY_PREFIX = "isk-"
KEY_HEADERS = ("x-api-key", "x-goog-api-key")
_CODE_BYTES = 12


def request_keys(path_key: str | None, headers: Mapping[str, str]) -> list[str]:
    """Return every key that a request carries: in the path, as bearer, in the headers of
    Anthropic's and Google's clients. With a key in the path, only session keys in the
    headers count, because agents send some placeholder there."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    keys: list[str] = []
    if scheme.lower() == "bearer" and bearer.strip():
        keys.append(bearer.strip())
    for header in KEY_HEADERS:
        api_key = headers.get(header, "")
        if api_key:
            keys.append(api_key)
    if path_key is None:
        return keys
    return [path_key, *(key for key in keys if key.startswith(KEY_PREFIX))]


def hash_key(key: str) -> bytes:
    """Hash a key. Keys have 192 random bits, so a plain hash is enough."""
    return hashlib.sha256(key.encode()).digest()


def single_key_hash(keys: Sequence[str]) -> bytes:
    """Return the hash of the key that a request carries. Raises SessionError 401 if it
    carries none, or two that differ."""
    hashes = [hash_key(key) for key in keys]
    if not hashes:
        raise unauthorized(
            "no key: give it as bearer, as x-api-key or as x-goog-api-key, a session's own also in the path"
        )
    for other in hashes:
        if not hmac.compare_digest(hashes[0], other):
            raise unauthorized(
                "the request carries two keys that differ", code="conflicting_keys"
            )
    return hashes[0]


def signed_key(name: str, secret: bytes) -> str:
    """Return the session key that begins with `name`, which contains the random bits.
    The appended code cannot be computed without `secret`."""
    code = hmac.digest(secret, b"session key\0" + name.encode(), "sha256")[:_CODE_BYTES]
    return name + base64.urlsafe_b64encode(code).decode()


def is_signed(key: str, secret: bytes) -> bool:
    """Whether `key` was made with `secret`. Its session may still be closed."""
    code_length = 4 * _CODE_BYTES // 3  # base64
    name = key[:-code_length]
    return hmac.compare_digest(signed_key(name, secret).encode(), key.encode())


def unauthorized(message: str, code: str = "invalid_api_key") -> SessionError:
    return SessionError(message, status=401, code=code)
