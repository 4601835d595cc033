"""One store and one environment key under one gateway after the other."""

from __future__ import annotations

import contextlib
from pathlib import Path

from running_gateway import Running, running

from invrl.gateway.rendering.renderer import Renderer
from invrl.types.sessions import Session


class Life:
    """The same store and key under one gateway after the other."""

    def __init__(
        self, folder: Path, model: Path, renderer: Renderer, **settings: object
    ) -> None:
        self.store = folder / "run.db"
        self._folder = folder
        self._model = model
        self._renderer = renderer
        self._settings = settings

    @contextlib.asynccontextmanager
    async def again(self, **changes: object):
        settings = self._settings | changes
        async with running(
            self._folder, self._model, self._renderer, **settings
        ) as gateway:
            yield gateway


async def ask(
    gateway: Running,
    session: Session,
    messages: list,
    *,
    retry: bool | None = None,
    **more,
):
    """`retry`: what the client says of its request; None: its first try."""
    client = gateway.client(session, base_url=f"{gateway.url}/s/{session.key}/v1")
    if retry is not None:
        more["extra_headers"] = {"x-stainless-retry-count": str(int(retry))}
    return await client.chat.completions.create(model="tiny", messages=messages, **more)
