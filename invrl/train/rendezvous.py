"""The store in which the processes of a torch group find each other, on one address and for a while.

torch's own rendezvous makes a store that listens on every interface and asks nobody for a key: whoever
reaches it can read, change and delete what ranks tell each other. Here it listens on the address that it is
given (loopback where all processes are on one machine). Once the group has come together,
`refuse_newcomers` lets nobody in, and `refuse_strangers` finds a stranger that came before and is still
connected; one that has left again is not found. On GPUs, where groups connect when they are first used,
neither is called. Torch is imported where it is needed: who only listens does not wait for it."""

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
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: accept 0 bytes of every packet


def listen(host: str) -> socket.socket:
    """A socket that listens on this address alone, at a port that is free. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=1024)


def interface_towards(host: str) -> str:
    """The network interface through which this machine reaches `host`: loopback's for itself. Raises OSError
    where there is no way."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as sender:
        sender.connect(address)  # sends nothing
        own = sender.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == family and one.address.partition("%")[0] == own for one in addresses):
            return name
    raise OSError(f"no network interface has the address {own}, from which {host} is reached")


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


def refuse_strangers(listener: socket.socket, *, members: int) -> None:
    """Once the group is there: raises TrainError if the store behind `listener`, which is in this process,
    has more connections than the group has members: these have one each."""
    port = listener.getsockname()[1]
    connected = [
        connection.raddr
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == port
    ]
    if len(connected) > members:
        peers = ", ".join(sorted(f"{peer.ip}:{peer.port}" for peer in connected))
        raise TrainError(
            f"{len(connected)} processes are connected to the store of a group of {members} "
            f"(from {peers}): something else has found its port, and may have changed what ranks tell each "
            "other. Start again; if it happens again, find out what connects to the ports of this machine"
        )
