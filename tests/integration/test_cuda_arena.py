"""The arena in a GPU's memory: this process is the trainer, the weight loader alone the
engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
import torch

from benchmarks.weight_updates.changing_weights import ChangingWeights
from benchmarks.weight_updates.loader_server import LoaderServer
from benchmarks.weight_updates.weight_updates import UpdatedEngine, measure_idle
from invrl.engines.client.weight_receiver import ArenaReceiver
from invrl.weights.checksums.multilinear_checksum import (
    SumsInPlace,
    whole_checksums,
)
from invrl.weights.config import ArenaWeights
from invrl.weights.tensors.tensor_slice import TensorSlice

ATTENTION = "model.layers.0.self_attn"
SHAPES = {
    "model.embed_tokens.weight": (1024, 256),
    f"{ATTENTION}.q_proj.weight": (256, 256),
    f"{ATTENTION}.k_proj.weight": (64, 256),
    f"{ATTENTION}.v_proj.weight": (64, 256),
    f"{ATTENTION}.o_proj.weight": (256, 256),
    "model.norm.weight": (256,),
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no GPU that the installed torch can use"
    ),
]


@asynccontextmanager
async def updated(
    folder: Path, mode: Literal["copy", "alias"]
) -> AsyncIterator[UpdatedEngine]:
    device = torch.device("cuda", 0)
    tensors = {
        name: torch.rand(shape, device=device).to(torch.bfloat16) + 0.5
        for name, shape in SHAPES.items()
    }
    weights = ChangingWeights(tensors, device=device)
    server = LoaderServer(await weights.layout(), folder, "cuda")
    try:
        server.wait_ready(deadline_s=300.0)
        async with server.client() as client:
            receiver = ArenaReceiver("loader", client, ArenaWeights(arena_mode=mode))
            engine = UpdatedEngine(
                weights,
                receiver,
                canary_prompts=(),
                dtype="bfloat16",
                deadline_s=60.0,
                device=device,
            )
            yield engine
    finally:
        server.stop()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_checksums_are_those_of_a_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (),
        (7,),
        (0, 4),
        (5, 3),
        (17, 1),
        (24, 64),
        (8, 16, 4),
        (1_000_000,),
        (4_000, 896),
    ]
    on_cpu = {
        str(shape): (100 * torch.randn(shape, generator=generator)).to(dtype)
        for shape in shapes
    }
    on_gpu = {name: tensor.cuda() for name, tensor in on_cpu.items()}
    assert whole_checksums(on_gpu) == whole_checksums(on_cpu)
    vector = on_gpu["(1000000,)"]
    moved = torch.cat([vector[:1], vector])[1:]  # begins within a word
    assert (
        whole_checksums({"moved": moved})["moved"]
        == whole_checksums(on_cpu)["(1000000,)"]
    )
    place = TensorSlice(dimension=1, start=448, stop=896, index=1, count=2)
    halves = [place.of(tensors["(4000, 896)"]) for tensors in (on_gpu, on_cpu)]
    sums = SumsInPlace({}, {"half": place}, {"half": (4_000, 896)})
    checksums = [sums.slice_checksums({"half": half}) for half in halves]
    assert checksums[0] == checksums[1]


@pytest.mark.parametrize("mode", ["copy", "alias"])
async def test_another_process_opens_the_arena_and_holds_the_trainers_bytes(
    mode: Literal["copy", "alias"], tmp_path: Path
) -> None:
    async with updated(tmp_path, mode) as engine:
        await engine.warm_up()
        part = await measure_idle(engine, name="loader", updates=20)
        assert part.failure == ""
        assert part.details["loader"]["unequal_tensors"] == 0
        await engine.change_weights()
        assert await engine.unequal_tensors() == len(SHAPES)  # the check can fail
