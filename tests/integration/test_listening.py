"""What trainer ranks and engines listen on: loopback alone, where all of them are on
one machine."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import psutil
from rank_pool import RankPool
from tiny_model import make_tiny_model
from train_reference import random_batch

from invrl.engines.fleet.fleet import Fleet
from invrl.train.config import TrainConfig
from invrl.types.metrics import resolve


def listening(pid: int) -> set[tuple[str, int]]:
    """Address and port of each TCP socket that a process and those below it accept
    connections on."""
    root = psutil.Process(pid)
    found: set[tuple[str, int]] = set()
    for process in (root, *root.children(recursive=True)):
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found.add((connection.laddr.ip, connection.laddr.port))
    return found


def refuses_unknown_connections(port: int) -> bool:
    """127.0.0.2 is this machine by another of its addresses: who listens on all of them
    answers there."""
    try:
        socket.create_connection(("127.0.0.2", port), timeout=60).close()
    except ConnectionRefusedError:
        return True
    return False


def test_trainer_ranks_listen_on_loopback_alone(pool: RankPool, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    trainer = pool.build(model, ranks=2, train=TrainConfig(train_dtype="float32"))
    batch = random_batch(0)
    assert resolve(trainer.train(batch))["tokens"] == batch.trained.tokens
    sockets = [listening(pid) for pid in trainer.each("pid")]
    assert sockets[0], "rank 0 serves the store"
    for address, port in set.union(*sockets):
        assert ipaddress.ip_address(address).is_loopback, (address, port)
        assert refuses_unknown_connections(port), (address, port)


async def test_engines_listen_on_loopback_alone(tiny_fleet: Fleet) -> None:
    sockets = listening(tiny_fleet.engines["engine-0"].server.pid)
    assert sockets
    for address, port in sockets:
        assert ipaddress.ip_address(address).is_loopback, (address, port)
        assert refuses_unknown_connections(port), (address, port)
