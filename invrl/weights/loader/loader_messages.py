"""Messages between the weight loader and its caller: the request, and the reply in a
file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from invrl.errors import BroadcastError, LayoutError, WeightSyncError
from invrl.interfaces import WeightLayout
from invrl.weights.tensors.tensor_slice import EngineRank
from invrl.weights.transports.arena import ArenaHandle
from invrl.weights.transports.broadcast import GroupInvitation
from invrl.weights.transports.weight_files import FileSource


class LoaderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to check the layout, load the arena's slot (if `arena`), a folder (if
    `folder`), a chain of folders (if `chain`) or a broadcast (if `broadcast`), and read
    back what is served (if `digest`)."""

    reply_path: str
    """File for the reply to this request only. A bare name in TMPDIR, from which the
    engine's HTTP process serves it."""
    tensors: WeightLayout
    """Whole tensors, even if the rank holds slices of them."""
    rank: EngineRank = EngineRank()
    checksums_add_up: bool = False
    """Hash with `multilinear_checksum.py`: for `rank_checksums`, even with one rank."""
    arena: ArenaHandle | None = None
    alias: bool = False
    """Point the parameters at the slot instead of copying. Without `arena`: check
    whether that is possible."""
    folder: str = ""
    """Folder for `read_folder`."""
    chain: tuple[str, ...] = ()
    """Folders for `load_chain`."""
    source: FileSource | None = None
    """Source of the folders' files. None: a disk of this machine."""
    fetch_deadline_s: float = 0.0
    broadcast: GroupInvitation | None = None
    digest: bool = False


class LoaderReply(msgspec.Struct, frozen=True, kw_only=True):
    error: str = ""
    error_is_layout: bool = False
    error_is_broadcast: bool = False
    checksums: dict[str, str] = {}
    """Checksums by tensor: of the parameters as read back, or, without `digest`, of
    what was copied into them. An alias writes nothing, and so has none without
    `digest`."""
    aliased: tuple[str, ...] = ()
    """Tensors whose place in the parameters is their place in the slot, after an
    alias."""


def read_reply(path: str) -> LoaderReply:
    """Read a reply from its file.

    Raises LayoutError, BroadcastError or WeightSyncError with the engine's own error,
    and WeightSyncError if there is no reply.
    """
    try:
        body = Path(path).read_bytes()
        reply = msgspec.json.decode(body, type=LoaderReply)
    except (OSError, msgspec.DecodeError) as error:
        raise WeightSyncError(
            f"the engine's weight loader left no reply: {error}"
        ) from error
    if reply.error and reply.error_is_layout:
        raise LayoutError(reply.error)
    if reply.error and reply.error_is_broadcast:
        raise BroadcastError(reply.error)
    if reply.error:
        raise WeightSyncError(reply.error)
    return reply
