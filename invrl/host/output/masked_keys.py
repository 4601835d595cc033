"""Masks keys in everything that is written into logs.

It covers session keys (`isk-...`), values named as a key or a token of an API (as
arguments, in JSON, in headers), `Authorization` headers, and keys and passwords in
URLs. Invariant: it is applied to the whole text of a log record, including the
traceback.
"""

import functools
import logging
import re

HIDDEN = "(not shown)"
"""Replacement that no pattern below takes for a key: text may be masked twice."""
SESSION_KEY_HIDDEN = "(session key)"
_SESSION_KEY = re.compile(r"isk-[A-Za-z0-9_=-]{8,}")
_VALUE = r"""[^"',\s)}]+"""
_NAME = r"(?:api|env|secret)[_-]?key\w*|(?:auth|access|api)[_-]token"
_NAMED = re.compile(
    rf"""(?i)((?:{_NAME})["']?\s*[:=]\s*+)((?:b?["'])?+)(?!(?:none|null)\b|\(){_VALUE}"""
)
_FLAG = re.compile(rf"""(?i)(--[\w-]*(?:{_NAME})\s+["']?)()(?![-(]){_VALUE}""")
_IN_PAIR = re.compile(
    rf"""(?i)(["'](?:x-(?:goog-)?)?(?:{_NAME})["'],\s*b?["'])()(?!\(){_VALUE}"""
)
"""A header as a pair: (b'x-api-key', b'...')."""
_HEADER = re.compile(
    rf"""(?i)(authorization["']?\s*[:=,]\s*+(?:b?["'])?+)((?:bearer|basic|token)\s+)?+(?!\(|none\b){_VALUE}"""
)
_BEARER = re.compile(r"(?i)(\bbearer\s+)()(?!\()[\w.~+/=-]{8,}")
_IN_QUERY = re.compile(
    r"(?i)([?&](?:key|token|secret|password|sig|signature)=)()(?!\()[^&#\s\"']+"
)
_IN_ADDRESS = re.compile(r"(://[^/\s:@\"']*:)()(?!\()[^/\s@\"']+(?=@)")
_MASKS = (_NAMED, _FLAG, _IN_PAIR, _HEADER, _BEARER, _IN_QUERY, _IN_ADDRESS)


def without_session_keys(text: str) -> str:
    """Return `text` without session keys."""
    return _SESSION_KEY.sub(SESSION_KEY_HIDDEN, text)


def without_keys(text: str) -> str:
    """Return `text` without keys of any kind."""
    text = without_session_keys(text)
    for mask in _MASKS:
        text = mask.sub(rf"\1\2{HIDDEN}", text)
    return text


def mask_keys_in_logs() -> None:
    """Mask keys in all later output of this process's logging handlers, including those
    of other packages. For processes whose log lines are not ours, such as an
    engine's."""
    render = logging.Handler.format
    if hasattr(render, "__wrapped__"):
        return

    @functools.wraps(render)
    def render_masked(self: logging.Handler, record: logging.LogRecord) -> str:
        return without_keys(render(self, record))

    logging.Handler.format = render_masked
