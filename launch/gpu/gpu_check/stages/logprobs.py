"""Log-probs of the trainer in bfloat16 next to Hugging Face's in bfloat16 and in
float32."""

import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.training.step_program import start_rank
from gpu_check.random_model import random_model
from gpu_check.result import emit
from gpu_check.settings import CheckSettings
from invrl.algorithms.config import AlgorithmConfig
from invrl.train.config import TrainConfig
from invrl.train.runtime import device

_LENGTHS = (40, 333, 1000)
_LARGEST_RATIO = 2.0
"""Of the trainer's error to Hugging Face's, in bfloat16 against float32: each rounds in
its own order."""


def run(settings: CheckSettings) -> None:
    model = str(random_model(settings, settings.model))
    train = TrainConfig.model_validate({"max_tokens_per_micro_batch": 4096})
    rank = start_rank(model, train, AlgorithmConfig.model_validate({}))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 500, length).tolist() for length in _LENGTHS]
    started = time.monotonic()
    ours = np.concatenate(rank.logprobs(prompts))
    first_pass_s = time.monotonic() - started
    plain = {
        dtype: _plain_logprobs(model, prompts, dtype)
        for dtype in (torch.bfloat16, torch.float32)
    }
    exact = plain[torch.float32]
    error = float(np.abs(ours - exact).mean())
    plain_error = float(np.abs(plain[torch.bfloat16] - exact).mean())
    emit(
        mean_error=error,
        mean_error_of_hugging_face=plain_error,
        first_pass_s=first_pass_s,
        peak_gb=device.peak_memory() / 1e9,
    )
    assert error <= _LARGEST_RATIO * plain_error, (
        f"{error:.2e} nats, Hugging Face's {plain_error:.2e}"
    )


@torch.no_grad()
def _plain_logprobs(
    model: str, prompts: list[list[int]], dtype: torch.dtype
) -> np.ndarray:
    """Of all tokens but the first of each prompt, one prompt after another."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    plain.to(device.device())  # pyright: ignore[reportArgumentType]
    picked: list[np.ndarray] = []
    for prompt in prompts:
        ids_1T = torch.tensor([prompt], device=device.device())
        logprobs_TV = plain(ids_1T).logits[0, :-1].float().log_softmax(-1)
        picked.append(logprobs_TV.gather(1, ids_1T[0, 1:, None])[:, 0].cpu().numpy())
    return np.concatenate(picked)
