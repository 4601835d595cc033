"""Ports of loopback that stay ours from the moment they are chosen until our server has
ended."""

import contextlib
import secrets
import socket

_LOOPBACK = "127.0.0.1"
_FIRST_PORT = 20_000
_FIRST_EPHEMERAL_PORT = 32_768
"""First port that Linux assigns by itself."""


def free_port() -> int:
    """Return a port that nobody listens on now, for a server that binds it immediately.

    A server that takes longer to start needs a `ReservedPort`.
    """
    with contextlib.closing(ReservedPort()) as port:
        return port.number


class ReservedPort:
    """A port that stays ours until our server listens on it, and while that server
    restarts.

    A bound socket that never listens holds it. Linux lets a second socket bind the same
    port only with SO_REUSEADDR, which uvicorn, tokio and libuv set. A program that
    searches for a free port without that option finds this one in use, and so does this
    class. The number is below those that Linux assigns by itself, because an engine
    takes a minute until it listens.
    """

    def __init__(self, number: int = 0) -> None:
        """`number`: a port that a user has chosen; 0: any free one. Raises OSError if
        another process listens on the chosen one, or if no port is free."""
        if number:
            self.number = number
            self._socket = socket.socket()
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                self._socket.bind((_LOOPBACK, number))
            except OSError:
                self._socket.close()
                raise
            return
        self._socket = _bound_socket()
        self.number = self._socket.getsockname()[1]
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def is_listened_on(self) -> bool:
        """Whether a process listens on the port. Ask after our own server has failed
        to: then it is a stranger."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_LOOPBACK, self.number))
            except OSError:
                return True
        return False

    def close(self) -> None:
        """Release the port. Idempotent."""
        self._socket.close()


def _bound_socket() -> socket.socket:
    """Return a socket bound to an unused port: a random one of our range or, if that is
    busy, one assigned by Linux. Raises OSError if none of these is free either."""
    size = _FIRST_EPHEMERAL_PORT - _FIRST_PORT
    for _ in range(size):
        bound = socket.socket()
        try:
            bound.bind((_LOOPBACK, _FIRST_PORT + secrets.randbelow(size)))
        except OSError:
            bound.close()
        else:
            return bound
    bound = socket.socket()
    bound.bind((_LOOPBACK, 0))
    return bound
