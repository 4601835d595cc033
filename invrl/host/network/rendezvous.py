"""Rendezvous of the ranks: the store through which the processes of a torch process
group find each other, on one address and closed to strangers once the group is
complete.

torch's own rendezvous makes a store that listens on every interface without a key:
anyone who reaches it can read, change and delete the ranks' messages. Here the store
listens only on the given address (loopback if all processes are on one machine). Once
the group is complete, `refuse_new_connections` admits nobody else, and
`refuse_unknown_connections` finds a stranger that connected earlier and is still
connected, but not one that has left again. On GPUs, where groups connect when they are
first used, neither is called.

Torch is imported inside functions: a process that only listens does not wait for it.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

from invrl.errors import TrainError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_SO_ATTACH_FILTER = 26  # <asm-generic/socket.h>
# a BPF program: accept 0 bytes of every packet
_DROP_EVERYTHING = struct.pack("HBBI", 0x06, 0, 0, 0)


def listen(host: str) -> socket.socket:
    """Return a socket that listens only on this address, at a free port. Raises
    OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=1024)


def interface_towards(host: str) -> str:
    """Return the network interface through which this machine reaches `host`; for its
    own address the loopback's.

    Raises OSError if there is no route.
    """
    addresses = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as sender:
        sender.connect(address)  # chooses a route; sends nothing
        own_address = sender.getsockname()[0]
    for name, interface_addresses in psutil.net_if_addrs().items():
        for candidate in interface_addresses:
            without_scope = candidate.address.partition("%")[0]
            if candidate.family == family and without_scope == own_address:
                return name
    raise OSError(
        f"no network interface has the address {own_address}, from which {host} is reached"
    )


def serve_store(
    listener: socket.socket, *, world_size: int, timeout: timedelta
) -> TCPStore:
    """Return the store behind `listener`, in this process. It owns a duplicate of the
    socket."""
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


def join_store(
    host: str, port: int, *, world_size: int, timeout: timedelta
) -> TCPStore:
    """Connect to the store that another process serves at this address. Raises torch's
    error if it does not answer in time."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        host_name=host,
        port=port,
        world_size=world_size,
        is_master=False,
        timeout=timeout,
    )


def refuse_new_connections(listener: socket.socket) -> None:
    """Make the kernel drop everything that arrives at the listening socket from now on,
    as if nobody listened. Existing connections continue.

    If the socket were closed instead, torch's thread would continue to poll the closed
    one.
    """
    program = ctypes.create_string_buffer(_DROP_EVERYTHING, len(_DROP_EVERYTHING))
    filter_program = struct.pack("HP", 1, ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_program)


def refuse_unknown_connections(listener: socket.socket, *, members: int) -> None:
    """Raise TrainError if the store behind `listener` has more connections than the
    group has members.

    Call it once the group is complete, in the process that serves the store. Each
    member has one connection.
    """
    port = listener.getsockname()[1]
    peers = [
        connection.raddr
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED
        and connection.laddr.port == port
    ]
    if len(peers) <= members:
        return
    addresses = ", ".join(sorted(f"{peer.ip}:{peer.port}" for peer in peers))
    raise TrainError(
        f"{len(peers)} processes are connected to the store of a group of {members} "
        f"(from {addresses}): something else has found its port, and may have changed what ranks tell each "
        "other. Start again; if it happens again, find out what connects to the ports of this machine"
    )
