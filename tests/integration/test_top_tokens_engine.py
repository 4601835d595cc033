"""The likeliest tokens that a real SGLang reports, beside the Hugging Face model in
float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from streamed import generate
from train_reference import Reference

from invrl.engines.client.generation import GenerateRequest
from invrl.engines.fleet.fleet import Fleet
from invrl.types.sessions import Sampling

BOUND = 1e-3
"""Nats: float32 in the engine."""
K = 6
TEMPERATURE = 0.7


async def test_top_tokens_of_an_engine_equal_the_models_at_the_sampling_temperature(
    tiny_fleet: Fleet, tiny_model: Path
) -> None:
    prompt = [1, 30, 40]
    whole = await generate(
        tiny_fleet.engines["engine-0"].client,
        GenerateRequest(
            rid="top-tokens",
            input_ids_T=np.array(prompt, np.int32),
            sampling=Sampling(max_new_tokens=20, temperature=TEMPERATURE),
            ignore_eos=True,
            top_logprobs=K,
        ),
    )
    top_TK = whole.top.reshape(-1, K)
    assert len(top_TK) == len(whole.ids_T) == 20
    tokens_T = torch.tensor([*prompt, *whole.ids_T.tolist()])
    with torch.no_grad():
        logprobs_TV = Reference(tiny_model).distributions(tokens_T, TEMPERATURE)[
            len(prompt) - 1 :
        ]
    expected_TK = logprobs_TV.gather(
        1, torch.from_numpy(top_TK["id"].astype(np.int64))
    ).numpy()
    assert np.abs(top_TK["logprob"] - expected_TK).max() < BOUND
    likeliest_TK = logprobs_TV.topk(K, dim=1).values.numpy()
    assert np.abs(top_TK["logprob"] - likeliest_TK).max() < BOUND
    untempered_TK = (
        (logprobs_TV * TEMPERATURE).log_softmax(1).topk(K, dim=1).values.numpy()
    )
    assert np.abs(top_TK["logprob"] - untempered_TK).max() > 10 * BOUND, (
        "the temperature would not be seen"
    )
