"""A training request leaves nothing to the server: one with preferences of its own
samples like any other."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from uuid import uuid4

import aiohttp
import numpy as np
import pytest
from streamed import generate

from invrl.engines.client.generation import GenerateRequest
from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.host.processes.fork_parent import ForkParent
from invrl.types.sessions import Sampling

pytestmark = pytest.mark.slow

PREFERENCES = {
    "top_k": 1,
    "frequency_penalty": 1.5,
    "stop_token_ids": list(range(0, 512, 3)),
    "min_p": 0.9,
}
PROMPT = [1, 30, 40]
TRIES = 6


@pytest.mark.timeout(1200)
async def test_sampling_preferences_of_the_server_do_not_change_training_requests(
    tiny_model: Path, engine_parent: ForkParent, tmp_path: Path
) -> None:
    config = EngineConfig(
        dtype="float32",
        start_timeout_s=900.0,
        health_interval_s=600.0,
    )
    fleet = Fleet(config, tiny_model, tmp_path, parent=engine_parent)
    # As a command-line option it is refused; here it stands for whatever sets defaults
    # in the server.
    fleet._launcher.sglang_flags = [
        "--preferred-sampling-params",
        json.dumps(PREFERENCES),
    ]
    await fleet.start()
    try:
        await fleet.admit()
        bare = [await ask_barely(fleet) for _ in range(TRIES)]
        # the preferences are at work: it is greedy
        assert len({tuple(ids) for ids in bare}) == 1
        assert len(bare[0]) < 24  # and stops at its own tokens
        ours = await asyncio.gather(
            *(ask_as_the_gateway_does(fleet) for _ in range(TRIES))
        )
        assert len({tuple(ids) for ids in ours}) == TRIES
        assert all(len(ids) == 24 for ids in ours)
    finally:
        await fleet.stop()


async def ask_barely(fleet: Fleet) -> list[int]:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 24, "temperature": 1.0},
        "return_logprob": True,
    }
    headers = {"Authorization": f"Bearer {fleet.router.api_key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            fleet.router.url + "/generate", json=body, headers=headers
        ) as response,
    ):
        answer = await response.json()
    return [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]


async def ask_as_the_gateway_does(fleet: Fleet) -> list[int]:
    request = GenerateRequest(
        rid=uuid4().hex,
        input_ids_T=np.array(PROMPT, np.int32),
        sampling=Sampling(max_new_tokens=24),
        ignore_eos=True,
    )
    async with SglangClient(
        fleet.router.url,
        limits=fleet.limits,
        api_key=fleet.router.api_key,
        name="router",
    ) as client:
        return (await generate(client, request)).ids_T.tolist()
