"""The store of a torch group: on one address, and shut once the group is there."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from datetime import timedelta

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from invrl.errors import TrainError
from invrl.host.network.rendezvous import (
    interface_towards,
    join_store,
    listen,
    refuse_new_connections,
    refuse_unknown_connections,
    serve_store,
)

SECONDS = timedelta(seconds=60)


def other_addresses() -> list[str]:
    """Of this machine, but for 127.0.0.1; 127.0.0.2 is always there."""
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
    return ["127.0.0.2", *found]


def reached(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=30).close()
    except ConnectionRefusedError:
        return False
    return True


def test_torchs_own_store_listens_on_every_interface() -> None:
    """What this is about. If it fails, torch has learnt it and our store may go."""
    store = TCPStore("127.0.0.1", 0, 1, True, SECONDS, wait_for_workers=False)
    assert all(reached(address, store.port) for address in other_addresses())


def test_store_is_not_reachable_over_another_interface() -> None:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    store = serve_store(listener, world_size=1, timeout=SECONDS)
    store.set("name", "value")
    assert (
        join_store("127.0.0.1", port, world_size=1, timeout=SECONDS).get("name")
        == b"value"
    )
    assert [address for address in other_addresses() if reached(address, port)] == []


def test_store_refuses_connections_after_the_group_is_complete() -> None:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    server = serve_store(listener, world_size=2, timeout=SECONDS)
    member = join_store("127.0.0.1", port, world_size=2, timeout=SECONDS)
    refuse_new_connections(listener)
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", port), timeout=1.0)
    waiter = threading.Thread(target=member.wait, args=(["later"],))
    waiter.start()
    server.set("later", "1")
    waiter.join()
    member.set("b", "2")
    assert server.get("b") == b"2"


def test_stranger_connected_before_the_group_is_complete_is_found() -> None:
    """One that has only connected: what it could do next is up to it."""
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    stranger = socket.create_connection(("127.0.0.1", port))
    server = serve_store(listener, world_size=2, timeout=SECONDS)
    member = join_store("127.0.0.1", port, world_size=2, timeout=SECONDS)
    server.set("name", "value")
    assert member.get("name") == b"value"
    with pytest.raises(
        TrainError,
        match=r"^3 processes are connected to the store of a group of 2 \(from 127",
    ):
        refuse_unknown_connections(listener, members=2)
    stranger.close()
    while (
        sum(
            is_at(connection, port)
            for connection in psutil.Process().net_connections("tcp")
        )
        > 2
    ):
        # until the store's thread has seen the end of the connection
        member.set("again", "value")
    refuse_unknown_connections(listener, members=2)


def is_at(connection, port: int) -> bool:
    return (
        connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == port
    )


def test_interface_is_found_for_each_local_address() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("localhost") == "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if not psutil.net_if_stats()[name].isup:
            continue
        for address in addresses:
            if address.family == socket.AF_INET:
                assert interface_towards(address.address) == name
    with pytest.raises(OSError, match=r"\w"):
        interface_towards("no such host.invalid")


def test_two_processes_form_a_group_over_the_store() -> None:
    code = """
import sys, torch
from datetime import timedelta
from invrl.host.network.rendezvous import join_store
limit = timedelta(seconds=60)
store = join_store("127.0.0.1", int(sys.argv[1]), world_size=2, timeout=limit)
torch.distributed.init_process_group("gloo", store=store, rank=1, world_size=2)
total = torch.ones(1)
torch.distributed.all_reduce(total)
print(total.item(), flush=True)
torch.distributed.destroy_process_group()
"""
    listener = listen("127.0.0.1")
    port = str(listener.getsockname()[1])
    other = subprocess.Popen(
        [sys.executable, "-c", code, port], stdout=subprocess.PIPE, text=True
    )
    store = serve_store(listener, world_size=2, timeout=SECONDS)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=2)
    try:
        refuse_new_connections(listener)
        refuse_unknown_connections(listener, members=2)
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        assert total.item() == 2.0
        assert other.communicate(timeout=120)[0] == "2.0\n"
    finally:
        torch.distributed.destroy_process_group()
