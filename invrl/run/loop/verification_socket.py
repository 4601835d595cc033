"""The socket in a run's folder through which `invrl verify-weights` asks the driver,
which holds the engines' keys and the committed checksums.

It is in the folder `private` and only its owner may connect. A connection is one
request and one answer, each a line of JSON. The socket exists from the first committed
version to the end of the incarnation; a killed driver leaves a file that nobody
answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from invrl.errors import DeadlineError, ServerError
from invrl.store.run_folder import RunFolder
from invrl.weights.update.verification import Verification

logger = logging.getLogger(__name__)
_REQUEST_DEADLINE_S = 30.0
_OWNER_ONLY = 0o600
Verify = Callable[[float], Awaitable[Verification]]
"""Takes the seconds that it may wait for an update to end."""


class VerifyRequest(msgspec.Struct, frozen=True, kw_only=True):
    wait_s: float
    """Seconds to wait for an update in progress."""


@asynccontextmanager
async def answer_verifications(
    folder: RunFolder, verify: Verify
) -> AsyncIterator[None]:
    """Answer requests during the block."""

    async def answer(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            async with asyncio.timeout(_REQUEST_DEADLINE_S):
                line = await reader.readline()
            request = msgspec.json.decode(line, type=VerifyRequest)
            try:
                result = await verify(request.wait_s)
            except Exception as error:
                logger.exception("the engines' weights could not be verified")
                result = Verification(
                    error=f"the engines' weights could not be verified: {error}"
                )
            writer.write(msgspec.json.encode(result) + b"\n")
            await writer.drain()
        except (OSError, msgspec.DecodeError) as error:  # TimeoutError is an OSError
            logger.warning("a request to verify the engines' weights: %r", error)
        finally:
            writer.close()

    path = folder.verification_path
    path.parent.mkdir(exist_ok=True)
    server = await asyncio.start_unix_server(answer, sock=_bound_socket(path))
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


def ask_for_verification(
    folder: RunFolder, *, wait_s: float, deadline_s: float
) -> Verification:
    """Request a verification. Raises ServerError if nobody answers, DeadlineError after
    `deadline_s`."""
    path = folder.verification_path
    request = VerifyRequest(wait_s=wait_s)
    try:
        with socket.socket(socket.AF_UNIX) as connection, _short(path) as short_path:
            connection.settimeout(deadline_s)
            connection.connect(short_path)
            connection.sendall(msgspec.json.encode(request) + b"\n")
            with connection.makefile("rb") as answers:
                line = answers.readline()
        return msgspec.json.decode(line, type=Verification)
    except TimeoutError:
        raise DeadlineError(
            f"the driver of {folder.path} to verify its engines", deadline_s
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise ServerError(
            f"the driver of {folder.path} does not answer: {error}"
        ) from error


def _bound_socket(path: Path) -> socket.socket:
    """Return a bound socket. Nobody can connect before it listens, and then only its
    owner."""
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX)
    with contextlib.ExitStack() as stack:
        stack.callback(bound.close)
        bound.bind(stack.enter_context(_short(path)))
        path.chmod(_OWNER_ONLY)
        stack.pop_all()
    return bound


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a path below a descriptor of its folder: a Unix socket's path has at most
    107 bytes."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
