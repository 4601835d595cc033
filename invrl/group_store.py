"""The store in which the processes of a torch group find each other, on one address and for a while.

torch's own rendezvous makes a store that listens on every interface and asks nobody for a key: whoever
reaches it can read, change and delete what ranks tell each other. Here it listens on the address that it is
given (loopback where all processes are on one machine), and lets nobody in once the group has come together.
Torch is imported where it is needed: who only listens does not wait for it."""

from __future__ import annotations

import ctypes
import socket
import struct
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_SO_ATTACH_FILTER = 26  # <asm-generic/socket.h>
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: accept 0 bytes of every packet


def listen(host: str) -> socket.socket:
    """A socket that listens on this address alone, at a port that is free. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=1024)


def serve_store(listener: socket.socket, *, world_size: int, timeout: timedelta) -> TCPStore:
    """The store behind `listener`, in this process. It owns a duplicate of the socket."""
    from torch._C._distributed_c10d import TCPStore

    host, port = listener.getsockname()[:2]
    return TCPStore(
        host_name=host,
        port=port,
        world_size=world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.dup().detach(),
    )


def join_store(host: str, port: int, *, world_size: int, timeout: timedelta) -> TCPStore:
    """The store that another process serves there. Raises torch's error if it does not answer in time."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host_name=host, port=port, world_size=world_size, is_master=False, timeout=timeout)


def refuse_newcomers(listener: socket.socket) -> None:
    """The kernel drops whatever comes to the listening socket from now on, as if nobody listened; connections
    that there are go on. Closing the socket instead would leave torch's thread polling a dead one."""
    program = ctypes.create_string_buffer(_RETURN_NOTHING, len(_RETURN_NOTHING))
    filter_program = struct.pack("HP", 1, ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_program)
