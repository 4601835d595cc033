"""What a rollout function is given: its session as an OpenAI and an Anthropic endpoint.

The connections of a worker's sessions are one pool (a TLS context and connection per rollout would cost more
than the request). Closing a session's client closes nothing of others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx

from invrl.rollout.session_client import CONNECTION_LIMITS
from invrl.types import Session

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_CONNECT_TIMEOUT_S = 10.0
_MAX_RETRIES = 2
"""Safe: the gateway answers a retry with the turn it recorded."""


class ConnectionPool(httpx.AsyncBaseTransport):
    """Connections of one event loop, shared by clients that come and go: a client's close leaves them
    open, they end with the process."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._transport = _new_transport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._transport.handle_async_request(request)


class SessionEndpoint:
    """One session's `interfaces.Endpoint`. `timeout_s` is the rollout's: no request need wait longer."""

    def __init__(self, session: Session, *, model: str, timeout_s: float, pool: ConnectionPool) -> None:
        self.base_url = session.base_url
        self.api_key = session.key
        self.model = model
        self._timeout_s = timeout_s
        self._pool = pool

    def openai(self) -> AsyncOpenAI:
        """A ready client. In the thread of a sync function (with an event loop of its own, perhaps)
        it has connections of its own: a pool belongs to one loop."""
        import openai  # a second to import: the driver, which imports this module, need not pay

        timeout = httpx.Timeout(self._timeout_s, connect=_CONNECT_TIMEOUT_S)
        # None in a thread without a loop, where asyncio.get_running_loop would raise.
        ours = asyncio._get_running_loop() is self._pool.loop
        transport = self._pool if ours else _new_transport()
        return openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=self.api_key,
            max_retries=_MAX_RETRIES,
            timeout=timeout,
            http_client=httpx.AsyncClient(transport=transport, timeout=timeout, follow_redirects=True),
        )

    def anthropic(self) -> Any:
        """A ready `anthropic.AsyncAnthropic`, with connections of its own: its newer releases take none of
        httpx's. ImportError if the package, which is no dependency of ours, is not installed."""
        try:
            import anthropic  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("endpoint.anthropic() needs a package: pip install anthropic") from error

        return anthropic.AsyncAnthropic(
            base_url=self.base_url.removesuffix("/v1"),  # the client adds it
            api_key=self.api_key,
            max_retries=_MAX_RETRIES,
            timeout=self._timeout_s,
            http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False),
        )


def _new_transport() -> httpx.AsyncHTTPTransport:
    return httpx.AsyncHTTPTransport(limits=CONNECTION_LIMITS, trust_env=False)
