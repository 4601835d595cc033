"""Requests that are kept in flight at an engine, and the times of their tokens."""

import asyncio
import time
from typing import Self
from uuid import uuid4

import numpy as np

from invrl.engines.client.generation import GenerateChunk, GenerateRequest
from invrl.engines.client.sglang_client import SglangClient
from invrl.errors import DeadlineError, InvrlError
from invrl.types.sessions import Sampling

_PROMPT_TOKENS = 32
_POLL_INTERVAL_S = 0.005
_AFTER_A_FAILURE_S = 0.2


class Streams:
    """Keeps a number of requests in flight: where one ends, the next begins. Use as an
    async context manager; requests that are in flight at the end are cancelled."""

    def __init__(
        self,
        client: SglangClient,
        *,
        number: int,
        max_new_tokens: int,
        deadline_s: float,
    ) -> None:
        """`deadline_s`: of each wait for tokens."""
        self.times: list[list[float]] = []
        """When the tokens of each request came, in seconds of the monotonic clock."""
        self.finished = 0
        self.failures: list[str] = []
        """Why requests ended without all of their tokens."""
        self._client = client
        self._number = number
        self._max_new_tokens = max_new_tokens
        self._deadline_s = deadline_s
        self._tokens = [0] * number
        """By place."""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._keep_in_flight(place))
            for place in range(self._number)
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait_for_tokens(self, count: int) -> None:
        """Until each place has so many tokens more. Raises DeadlineError."""
        wanted = [tokens + count for tokens in self._tokens]
        give_up_at = time.monotonic() + self._deadline_s
        while any(
            tokens < least for tokens, least in zip(self._tokens, wanted, strict=True)
        ):
            if time.monotonic() > give_up_at:
                reasons = "; ".join(self.failures[-3:]) or "none failed"
                waited_for = (
                    f"{count} tokens from each of {self._number} requests ({reasons})"
                )
                raise DeadlineError(waited_for, self._deadline_s)
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _keep_in_flight(self, place: int) -> None:
        random = np.random.default_rng(place)
        prompt_T = random.integers(
            0, self._client.limits.vocab_size, _PROMPT_TOKENS
        ).astype(np.int32)
        # The first requests end one after the other, so that those behind them do not
        # begin together.
        max_new_tokens = (
            self._max_new_tokens * (self._number + place) // (2 * self._number)
        )
        while True:
            request = GenerateRequest(
                rid=f"bench-{uuid4().hex}",
                input_ids_T=prompt_T,
                sampling=Sampling(max_new_tokens=max_new_tokens),
                ignore_eos=True,
                routing_key=f"bench-{place}",
            )
            try:
                await self._run_one(place, request)
            except InvrlError as error:
                self.failures.append(str(error))
                await asyncio.sleep(_AFTER_A_FAILURE_S)
            max_new_tokens = self._max_new_tokens

    async def _run_one(self, place: int, request: GenerateRequest) -> None:
        times: list[float] = []
        self.times.append(times)
        received = 0
        finish_reason = ""
        async for item in self._client.stream(request):
            if isinstance(item, GenerateChunk):
                times.append(time.monotonic())
                received += len(item.ids_T)
                self._tokens[place] += len(item.ids_T)
            else:
                finish_reason = item.finish_reason
        if finish_reason == "length" and received == request.sampling.max_new_tokens:
            self.finished += 1
        else:
            wanted = request.sampling.max_new_tokens
            self.failures.append(
                f"{received} of {wanted} tokens, finish reason {finish_reason}"
            )
