"""Ids by which clients know a turn: that of its answer, in any dialect, or the turn's
own. Pure."""

import re

_ANSWER_ID = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)(turn-[0-9a-f]+)")
"""The turn's id after a prefix of the dialect."""


def turn_id_from_response(name: str) -> str:
    """Return the id of the turn that an answer's id names; any other name unchanged."""
    match = _ANSWER_ID.fullmatch(name)
    if match is None:
        return name
    return match[1]
