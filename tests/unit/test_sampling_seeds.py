"""Seeds of generations: the hash behind SGLang's seeded noise, against the algorithm as published and against
SGLang's own kernel; how a seed comes from a place; what the gateway sends."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from test_gateway_turns import ASK, MORE, model, renderer, running  # noqa: F401

from invrl.cpu_stand_ins import murmur_hash32
from invrl.gateway.rendering import Renderer
from invrl.gateway.sampling import sampling_seed
from invrl.types import Sampling, Session

SESSION = Session(
    id="random", key="random", base_url="random", task_id="t", group_id="g7", index=3, attempt=0,
    purpose="train", sampling=Sampling(),
)  # fmt: skip
PROMPT = bytes(range(16))


def murmur3_x86_32(data: bytes, seed: int) -> int:
    """MurmurHash3_x86_32, for data of whole 4-byte blocks, on Python's integers."""
    word = 2**32 - 1
    hashed = seed
    for (block,) in struct.iter_unpack("<I", data):
        k = block * 0xCC9E2D51 & word
        k = (k << 15 | k >> 17) & word
        hashed ^= k * 0x1B873593 & word
        hashed = (hashed << 13 | hashed >> 19) & word
        hashed = hashed * 5 + 0xE6546B64 & word
    hashed ^= len(data)
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & word
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & word
    return hashed ^ hashed >> 16


def test_the_hash_is_murmur3_of_seed_position_and_column() -> None:
    # values published for the algorithm (verification vectors of other implementations)
    assert murmur3_x86_32(b"", 1) == 0x514E28B7
    assert murmur3_x86_32(b"\xff\xff\xff\xff", 0) == 0x76293B50
    assert murmur3_x86_32(b"\x21\x43\x65\x87", 0) == 0xF55B516B
    assert murmur3_x86_32(b"aaaa", 0x9747B28C) == 0x5A97808A
    seeds = [0, 1, 42, 2**31 - 1, 2**32 + 5, 2**63 + 11, 2**64 - 1]
    positions = [0, 1, 511, 40_000, 7, 2**31 - 1, 3]
    columns = [0, 1, 255, 49_151, 262_143]
    hashed = murmur_hash32(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    assert hashed.dtype == torch.uint32
    assert hashed.tolist() == [
        [murmur3_x86_32(struct.pack("<QII", seed, position, column), 0) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]


def test_the_hash_is_that_of_sglangs_kernel() -> None:
    """Its Triton kernel in Triton's interpreter, which must be chosen before triton is imported."""
    program = """
import importlib.util, torch
from invrl.cpu_stand_ins import murmur_hash32
[sglang] = importlib.util.find_spec("sglang").submodule_search_locations
path = sglang + "/kernels/ops/sampling/murmur_hash.py"
spec = importlib.util.spec_from_file_location("murmur_hash", path)
theirs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(theirs)
draw = torch.Generator().manual_seed(0)
seeds = torch.randint(-(2**63), 2**63 - 1, (4,), generator=draw).view(torch.uint64)
positions, columns = torch.randint(0, 2**20, (4,), generator=draw), torch.arange(1500)
hashed = torch.empty((4, 1500), dtype=torch.uint32)
theirs.murmur_hash32_kernel[(4, 2)](seeds, positions, columns, hashed, 4, 1500, BLOCK_SIZE=1024)
assert torch.equal(hashed, murmur_hash32(seeds, positions, columns))
"""
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=400, env=environ)


def test_a_seed_is_of_the_place_alone() -> None:
    seed = sampling_seed(0, SESSION, PROMPT, 1)
    assert seed == 1584714016  # pinned: a run that is resumed by a later version must go on as it began
    assert sampling_seed(0, replace(SESSION, id="x", key="x", base_url="x"), PROMPT, 1) == seed
    others = [
        sampling_seed(1, SESSION, PROMPT, 1),
        sampling_seed(0, SESSION, PROMPT[::-1], 1),
        sampling_seed(0, SESSION, PROMPT, 2),
        *(
            sampling_seed(0, replace(SESSION, **{name: value}), PROMPT, 1)
            for name, value in {"purpose": "eval", "group_id": "g8", "index": 4, "attempt": 1}.items()
        ),
    ]
    assert len({seed, *others}) == 1 + 7
    drawn = [sampling_seed(0, SESSION, PROMPT, nth) for nth in range(4000)]
    assert all(0 <= one < 2**31 for one in drawn)
    assert len(set(drawn)) == 4000
    for bit in range(31):
        # 4000 fair coins: 6 standard deviations are 190
        assert abs(sum(one >> bit & 1 for one in drawn) - 2000) < 190


async def test_the_gateway_sends_a_seed_with_each_generation(
    tmp_path: Path,
    model: Path,  # noqa: F811
    renderer: Renderer,  # noqa: F811
) -> None:
    async with running(tmp_path, model, renderer, sampling_seed=5) as gateway:
        # One answer to all, so that the prompts of the second turns are equal too.
        gateway.engine.script = lambda _: [40, 41, 2]

        async def seeds(session: Session, *, seed: int | None = None) -> list[int]:
            """Of a question, the next turn, the question anew (a fresh conversation)."""
            before, client = len(gateway.engine.requests), gateway.client(session)
            extra = {} if seed is None else {"seed": seed}
            first = await client.chat.completions.create(model="tiny", messages=[ASK], **extra)
            reply = {"role": "assistant", "content": first.choices[0].message.content}
            for messages in ([ASK, reply, MORE], [ASK]):
                # The same question again is a retry, unless the client says otherwise.
                await client.chat.completions.create(
                    model="tiny", messages=messages, extra_headers={"x-stainless-retry-count": "0"}, **extra
                )
            sent = gateway.engine.requests[before:]
            return [request["sampling_params"]["sampling_seed"] for request in sent]

        first, second = await gateway.open(members=2)
        [replaced] = await gateway.open(group_id="g", members=1)
        [served] = await gateway.open(purpose="serve")
        of_first = await seeds(first)
        assert len(set(of_first)) == 3
        assert all(isinstance(one, int) for one in of_first)
        assert not set(await seeds(second)) & set(of_first)
        assert await seeds(replaced, seed=9) == of_first  # the same place; training does not ask the client
        assert await seeds(served, seed=9) == [9, 9, 9]
        [reordered] = await gateway.open()
        for message in (MORE, ASK):  # as requests that were sent at once may arrive
            await gateway.client(reordered).chat.completions.create(model="tiny", messages=[message])
        assert gateway.engine.requests[-1]["sampling_params"]["sampling_seed"] == of_first[0]
        assert not {9, *of_first} & set(await seeds((await gateway.open(purpose="serve"))[0]))
