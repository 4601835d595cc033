"""Checksums of training data in a run's store, so that a changed byte is found.

SQLite finds a damaged page, not a changed byte inside a value, and a wrong byte of a
token, a log-prob or a reward is not recognisable. The checksum is xxh3 with 64 bits:
against chance, not against forgery.
"""

from collections.abc import Sequence

import msgspec

ADD_CHECKSUM = "INSERT OR REPLACE INTO checksums VALUES (?,?)"


def row_checksum(*values: object) -> bytes:
    """Hash the values of one row, as SQLite stores them."""
    import xxhash

    return xxhash.xxh3_64_digest(msgspec.msgpack.encode(values))


def turn_item(turn_id: str) -> str:
    return f"turn/{turn_id}"


def delivered_item(turn_id: str) -> str:
    """Name of an item with an empty checksum, present once the turn is marked as
    delivered."""
    return f"turn/{turn_id}/delivered"


def outcome_item(session_id: str) -> str:
    return f"outcome/{session_id}"


def experts_item(turn_id: str) -> str:
    return f"turn/{turn_id}/experts"


def top_item(turn_id: str) -> str:
    return f"turn/{turn_id}/top"


def numbers_item(turn_id: str, name: str) -> str:
    return f"turn/{turn_id}/numbers/{name}"


def whole_outcome(copies: Sequence[bytes], checksum: bytes | None) -> bytes | None:
    """Return the written outcome, from its copies in `sessions` and `outbox`; None if
    it is unclear. Two of the copies and the checksum must agree."""
    for copy in copies:
        if row_checksum(copy) == checksum:
            return copy
    if len(copies) == 2 and copies[0] == copies[1]:
        return copies[0]
    return None
