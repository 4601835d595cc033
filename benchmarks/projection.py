"""Peak memory and speed of the vocabulary projection with log-probs, forward and
backward.

    python -m benchmarks.projection [--vocabulary 151936] [--hidden 896] [--rows 1024]
    [--dtype bfloat16]

Plain: all logits by one product, a float32 copy, divided by the temperature,
log_softmax, gather, and torch's autograd. Memory is the growth of the peak over weight
and hidden states; both ways have the gradient of the weight, which is printed apart.
Each way is measured in a process of its own. Speeds are taken in turns in one process,
in CPU-seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from invrl.train.batches.micro_batch import MicroBatch, TokenSequence
from invrl.train.batches.packing import pack
from invrl.train.model.logprobs import projected_logprobs

WAYS = ("plain", "blocks")


def one_row(num_trained: int, vocabulary: int) -> MicroBatch:
    rng = np.random.default_rng(0)
    row = TokenSequence(
        tokens_T=rng.integers(0, vocabulary, num_trained + 1).astype(np.int32),
        wanted_N=np.arange(1, num_trained + 1),
        temperature=0.7,
    )
    (micro_batch,) = pack([row], max_tokens=num_trained, share_prefixes=True)
    return micro_batch


def plain_logprobs(
    hidden_UH: torch.Tensor, weight_VH: torch.Tensor, micro_batch: MicroBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    temperature_U = torch.from_numpy(micro_batch.temperature_U)[:, None]
    logprobs_UV = (
        torch.nn.functional.linear(hidden_UH, weight_VH).float() / temperature_U
    ).log_softmax(1)
    logprobs_NV = logprobs_UV[torch.from_numpy(micro_batch.projection_N)]
    entropy_N = -(logprobs_NV.detach().exp() * logprobs_NV.detach()).sum(1)
    return logprobs_NV.gather(1, torch.from_numpy(micro_batch.targets_N)[:, None])[
        :, 0
    ], entropy_N


def steps(arguments: argparse.Namespace) -> dict[str, Callable[[], torch.Tensor]]:
    """A forward and a backward pass of each way; returns the log-probs."""
    dtype = getattr(torch, arguments.dtype)
    micro_batch = one_row(arguments.rows, arguments.vocabulary)
    generator = torch.Generator().manual_seed(0)
    hidden_UH = (
        torch.randn(arguments.rows, arguments.hidden, generator=generator)
        .to(dtype)
        .requires_grad_()
    )
    weight_VH = torch.randn(
        arguments.vocabulary, arguments.hidden, generator=generator
    ).to(dtype)
    weight_VH = weight_VH.mul_(0.05).requires_grad_()

    def step(compute: Callable[..., tuple[torch.Tensor | None, ...]]) -> torch.Tensor:
        hidden_UH.grad = None
        weight_VH.grad = None
        logprobs_N, *_ = compute(hidden_UH, weight_VH, micro_batch)
        assert logprobs_N is not None
        logprobs_N.sum().backward()
        return logprobs_N.detach()

    return {
        "plain": lambda: step(plain_logprobs),
        "blocks": lambda: step(projected_logprobs),
    }


def peak_growth(arguments: argparse.Namespace) -> int:
    """Bytes by which one step of `arguments.only` raises this process's peak."""
    step = steps(arguments)[arguments.only]
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _resident("VmHWM")
    step()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    lines = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
    )
    return int(lines[name].split()[0]) * 1024


def speed_ratios(arguments: argparse.Namespace) -> list[float]:
    """Seconds of the plain way over those of ours, once per repetition."""
    by_way = steps(arguments)
    # the first step of each is slower
    logprobs = {way: step() for way, step in by_way.items()}
    torch.testing.assert_close(
        logprobs["blocks"], logprobs["plain"], rtol=1e-4, atol=1e-4
    )
    ratios: list[float] = []
    for _ in range(arguments.repetitions):
        seconds: dict[str, float] = {}
        for way, step in by_way.items():
            started = time.process_time()
            step()
            seconds[way] = time.process_time() - started
        ratios.append(seconds["plain"] / seconds["blocks"])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only:
        print(peak_growth(arguments))
        return
    growth: dict[str, int] = {}
    for way in WAYS:
        command = [
            sys.executable,
            "-m",
            "benchmarks.projection",
            *sys.argv[1:],
            "--only",
            way,
        ]
        growth[way] = int(
            subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True
            ).stdout
        )
    ratios = speed_ratios(arguments)
    weight_gradient = (
        arguments.vocabulary
        * arguments.hidden
        * getattr(torch, arguments.dtype).itemsize
    )
    result = {
        "rows": arguments.rows,
        "vocabulary": arguments.vocabulary,
        "hidden": arguments.hidden,
        "dtype": arguments.dtype,
        "plain_peak_mb": round(growth["plain"] / 1e6),
        "blocks_peak_mb": round(growth["blocks"] / 1e6),
        "weight_gradient_mb": round(weight_gradient / 1e6),
        "memory_ratio": round(growth["plain"] / growth["blocks"], 2),
        "memory_ratio_of_the_rest": round(
            (growth["plain"] - weight_gradient) / (growth["blocks"] - weight_gradient),
            2,
        ),
        "speed_ratio": round(median(ratios), 3),
        "speed_ratios": [round(ratio, 3) for ratio in ratios],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
