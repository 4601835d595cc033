"""A teacher that a real SGLang has: it scores what it sampled itself as it did then."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
from streamed import generate

from invrl.engines.client.generation import GenerateRequest
from invrl.engines.fleet.fleet import Fleet
from invrl.run.loop.teacher import Teacher
from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.sessions import Sampling
from invrl.types.weights import WeightVersion
from invrl.user_code.model_folder import read_tokenizer

BOUND = 1e-3
"""Nats: float32 in the engine."""
VOCABULARY = 512


def sample_of(
    prompt: list[int], sampled_T: np.ndarray, logprobs_T: np.ndarray
) -> TrainSample:
    tokens_T = np.concatenate([prompt, sampled_T]).astype(np.int32)
    mask_T = np.arange(len(tokens_T)) >= len(prompt)
    return TrainSample(
        tokens_T=tokens_T,
        loss_mask_T=mask_T,
        rollout_logprobs_T=np.concatenate([np.zeros(len(prompt)), logprobs_T]).astype(
            np.float32
        ),
        versions_T=np.where(mask_T, 0, -1).astype(np.int32),
        reward=0.0,
        temperature=1.0,
        group_id="g",
        rollout_id=f"r{len(tokens_T)}",
        attempt=0,
        turn_ids=("t",),
    )


async def test_real_engine_scores_its_own_tokens_with_the_sampled_logprobs(
    tiny_fleet: Fleet, tiny_model: Path
) -> None:
    """The last id of the vocabulary is in a row, too: SGLang reports it under another
    id."""
    engine = tiny_fleet.engines["engine-0"]
    samples: list[TrainSample] = []
    for number, prompt in enumerate(([1, 30, 40], [5, 400, 33, 33, 90], [7, 8])):
        whole = await generate(
            engine.client,
            GenerateRequest(
                rid=f"teacher-{number}",
                input_ids_T=np.array(prompt, np.int32),
                sampling=Sampling(max_new_tokens=20 + number),
                ignore_eos=True,
            ),
        )
        samples.append(sample_of(prompt, whole.ids_T, whole.logprobs_T))
    last_id = sample_of(
        [1, 30], np.array([VOCABULARY - 1, 0, VOCABULARY - 1]), np.zeros(3)
    )
    batch = TrainBatch(
        batch_id=0,
        version=WeightVersion(0),
        samples=(*samples, last_id),
        advantages=tuple(
            np.zeros(len(sample.tokens_T), np.float32) for sample in (*samples, last_id)
        ),
    )
    teacher = Teacher(
        engine.server.url, key=engine.server.api_key, timeout_s=60.0, concurrency=2
    )
    assert await teacher.check(read_tokenizer(tiny_model))
    scored = await teacher.score(batch)
    for sample in scored.samples[:-1]:
        gap_T = np.abs(sample.columns["teacher"] - sample.rollout_logprobs_T)
        assert gap_T.max() < BOUND
    measured = scored.samples[-1].columns["teacher"][2]
    body = {
        "input_ids": [1, 30],
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "top_logprobs_num": VOCABULARY,
    }
    async with httpx.AsyncClient(
        headers={"Authorization": f"Bearer {engine.server.api_key}"}
    ) as http:
        answer = (
            await http.post(f"{engine.server.url}/generate", json=body, timeout=60.0)
        ).json()
    [after_prompt] = answer["meta_info"]["output_top_logprobs"]
    logprob_of = {token_id: logprob for logprob, token_id, *_ in after_prompt}
    assert abs(measured - logprob_of[VOCABULARY - 1]) < BOUND
    assert abs(measured - logprob_of[0]) > 10 * BOUND, "the two could not be told apart"
