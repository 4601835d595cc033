"""A port is ours from the moment it is chosen, although its server takes its time to
listen."""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from invrl.host.network.ports import ReservedPort, free_port
from invrl.host.processes.process import ServerProcess


@pytest.fixture
def port() -> Iterator[ReservedPort]:
    with contextlib.closing(ReservedPort()) as port:
        yield port


def listening(
    number: int, *, reuse_address: bool = True, host: str = "127.0.0.1"
) -> socket.socket:
    """As a server does; OSError if it cannot."""
    server = socket.socket()
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse_address))
        server.bind((host, number))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def test_a_hundred_reserved_ports_are_distinct() -> None:
    """Drawn without being held, in 12,768 places, they were not in a third of the
    cases."""
    with contextlib.ExitStack() as stack:
        ports = [
            stack.enter_context(contextlib.closing(ReservedPort())) for _ in range(100)
        ]
        assert len({port.number for port in ports}) == 100


def only_draws(monkeypatch: pytest.MonkeyPatch, numbers: list[int]) -> None:
    monkeypatch.setattr(secrets, "randbelow", lambda _: numbers.pop(0) - 20_000)


def test_a_busy_range_is_left_for_the_ports_that_linux_gives_away(
    port: ReservedPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "randbelow", lambda _: port.number - 20_000)
    with contextlib.closing(ReservedPort()) as another:
        assert another.number >= 32_768
        with contextlib.closing(listening(another.number)):
            assert another.is_listened_on()


@pytest.mark.parametrize("draw", [lambda: ReservedPort().number, free_port])
def test_reserved_port_is_not_drawn_again(
    draw: Callable[[], int], port: ReservedPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(ReservedPort()) as another:
        free = another.number
    only_draws(monkeypatch, [port.number, port.number, free])
    assert draw() == free


def test_port_with_a_listening_server_is_not_drawn_again(
    port: ReservedPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(ReservedPort()) as another:
        free = another.number
    with listening(port.number):
        only_draws(monkeypatch, [port.number, free])
        assert free_port() == free


def test_server_of_a_reserved_port_can_listen_repeatedly(port: ReservedPort) -> None:
    for _ in range(3):
        assert not port.is_listened_on()
        with listening(port.number):
            assert port.is_listened_on()
            with pytest.raises(OSError, match="in use"):
                listening(port.number)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_socket_without_address_reuse_cannot_take_a_reserved_port(
    port: ReservedPort, host: str
) -> None:
    with pytest.raises(OSError, match="in use"):
        listening(port.number, reuse_address=False, host=host)


def test_reserved_port_refuses_connections_before_its_server_listens(
    port: ReservedPort,
) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port.number))


def test_child_process_can_listen_on_a_reserved_port(
    port: ReservedPort, tmp_path: Path
) -> None:
    """uvicorn, as SGLang runs it; the router is in the tests of the fleet."""
    program = "import sys, uvicorn; uvicorn.run(None, host='127.0.0.1', port=int(sys.argv[1]), lifespan='off')"
    command = [sys.executable, "-c", program, str(port.number)]
    for _ in range(2):
        server = ServerProcess("server", command, log=tmp_path / "log")
        try:
            server.wait_until(port.is_listened_on, "listen", deadline_s=300.0)
        finally:
            server.stop()


def test_closed_port_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    port = ReservedPort()
    port.close()
    port.close()
    only_draws(monkeypatch, [port.number])
    assert free_port() == port.number
