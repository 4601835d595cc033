"""The endpoint of a rollout function: its session for OpenAI and Anthropic clients, its
rewards and children.

All sessions of a worker share one pool of connections: a TLS context and a connection
per rollout would cost more than the request. Closing the client of one session leaves
the connections of the others open.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import httpx

from invrl.rollout.workers.session_client import CONNECTION_LIMITS, SessionClient
from invrl.types.sessions import Reward, Session

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_CONNECT_TIMEOUT_S = 10.0
_MAX_RETRIES = 2
"""Retries are safe: the gateway answers a repeated request with the turn that it
recorded."""


class ConnectionPool(httpx.AsyncBaseTransport):
    """The connections of one event loop, shared by the clients of many sessions. They
    stay open when a client is closed, and end with the process."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._transport = _new_transport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._transport.handle_async_request(request)


class SessionEndpoint:
    """The `interfaces.Endpoint` of one session. `timeout_s` is the time limit of the
    whole rollout, and of each request."""

    def __init__(
        self, session: Session, *, model: str, timeout_s: float, pool: ConnectionPool
    ) -> None:
        self._session = session
        self.base_url = session.base_url
        self.api_key = session.key
        self.model = model
        self._timeout_s = timeout_s
        self._pool = pool

    def openai(self) -> AsyncOpenAI:
        """Return a client. In the worker's event loop it uses the shared pool. A pool
        belongs to one loop, so in the thread of a sync function the client gets
        separate connections."""
        import openai  # Takes a second. The driver imports this module too and does not need it.

        timeout = httpx.Timeout(self._timeout_s, connect=_CONNECT_TIMEOUT_S)
        transport = self._transport()
        return openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=self.api_key,
            max_retries=_MAX_RETRIES,
            timeout=timeout,
            http_client=httpx.AsyncClient(
                transport=transport, timeout=timeout, follow_redirects=True
            ),
        )

    def anthropic(self) -> Any:
        """Return an `anthropic.AsyncAnthropic`. It has separate connections, because
        newer releases do not accept a transport of httpx. Raises ImportError if the
        package, which invrl does not depend on, is not installed."""
        try:
            import anthropic  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError(
                "endpoint.anthropic() needs a package: pip install anthropic"
            ) from error
        return anthropic.AsyncAnthropic(
            base_url=self.base_url.removesuffix("/v1"),  # the client adds /v1 itself
            api_key=self.api_key,
            max_retries=_MAX_RETRIES,
            timeout=self._timeout_s,
            http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False),
        )

    async def reward(
        self,
        value: float,
        *,
        turn: str = "",
        branch: str = "",
        components: Mapping[str, float] | None = None,
    ) -> None:
        """See `interfaces.Endpoint.reward`."""
        reward = Reward(
            value=value, components=components or {}, turn=turn, branch=branch
        )
        async with self._session_client() as client:
            await client.reward(self._session, reward)

    async def open_child(self) -> SessionEndpoint:
        """See `interfaces.Endpoint.open_child`."""
        async with self._session_client() as client:
            child = await client.open_child(self._session)
        return SessionEndpoint(
            child, model=self.model, timeout_s=self._timeout_s, pool=self._pool
        )

    @contextlib.asynccontextmanager
    async def _session_client(self) -> AsyncIterator[SessionClient]:
        gateway_url = self.base_url.removesuffix(f"/s/{self.api_key}/v1")
        client = SessionClient(
            gateway_url, deadline_s=self._timeout_s, transport=self._transport()
        )
        try:
            yield client
        finally:
            await client.close()

    def _transport(self) -> httpx.AsyncBaseTransport:
        """Return the shared pool, or new connections outside of its event loop."""
        # In a thread without a loop `_get_running_loop` returns None, where
        # `get_running_loop` would raise.
        if asyncio._get_running_loop() is not self._pool.loop:
            return _new_transport()
        return self._pool


def _new_transport() -> httpx.AsyncHTTPTransport:
    return httpx.AsyncHTTPTransport(limits=CONNECTION_LIMITS, trust_env=False)
