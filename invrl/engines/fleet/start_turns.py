"""Turns in which engines are started again, on GPUs that they share with the trainer."""

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext


class StartTurns:
    """One engine starts at a time, and none while the trainer has the GPUs: an engine
    takes the memory that is free when it starts."""

    def __init__(self, *, shares_gpus: bool) -> None:
        self.shares_gpus = shares_gpus
        self.are_held = False
        """The trainer has the GPUs, and the turn."""
        self._turn = asyncio.Lock()

    def turn(self) -> AbstractAsyncContextManager[object]:
        """Return the turn of an engine, from its start until it has joined. There is no
        need to wait for it if no GPU is shared."""
        return self._turn if self.shares_gpus else nullcontext()

    async def hold(self) -> None:
        """Wait for the turn of the engine that starts, and hold off further ones."""
        await self._turn.acquire()
        self.are_held = True

    def allow(self) -> None:
        """End `hold`; do nothing if starts are not held off."""
        if self.are_held:
            self.are_held = False
            self._turn.release()
