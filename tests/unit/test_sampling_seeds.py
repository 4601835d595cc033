"""Seeds of generations: the noise of SGLang's seeded sampler on CPU; how a seed comes
from a place; what the gateway sends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from running_gateway import ASK, MORE, running

from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.turns.sampling import sampling_seed
from invrl.host.sglang_on_cpu import seeded_noise
from invrl.types.sessions import Sampling, Session

SESSION = Session(
    id="random",
    key="random",
    base_url="random",
    task_id="t",
    group_id="g7",
    index=3,
    attempt=0,
    purpose="train",
    sampling=Sampling(),
)
PROMPT = bytes(range(16))


def test_noise_depends_only_on_seed_and_position_and_is_uniform() -> None:
    seeds = [0, 0, 2**64 - 1, 2**31]
    positions = [0, 1, 0, 2**31 - 1]
    columns = torch.arange(50_000)

    def noise(rows: list[int]) -> torch.Tensor:
        seed = torch.tensor([seeds[row] for row in rows], dtype=torch.uint64)
        return seeded_noise(
            seed, torch.tensor([positions[row] for row in rows]), columns
        )

    drawn = noise([0, 1, 2, 3])
    assert drawn.dtype == torch.uint32
    for row in range(4):  # whatever stands beside it
        assert torch.equal(noise([row])[0], drawn[row])
        assert torch.equal(noise([3 - row, row])[1], drawn[row])
    shares = drawn.to(torch.float64) / 2**32
    # mean and correlation of 50,000 uniform numbers: 6 standard deviations
    assert (shares.mean(1) - 0.5).abs().max() < 6 * (1 / 12 / 50_000) ** 0.5
    assert (torch.corrcoef(shares) - torch.eye(4)).abs().max() < 6 / 50_000**0.5
    assert (shares < 0.001).sum(1).sub(50).abs().max() < 6 * 50**0.5


def test_sampling_seed_depends_only_on_the_place_in_the_run() -> None:
    seed = sampling_seed(0, SESSION, PROMPT, 1)
    # pinned: a run that is resumed by a later version must go on as it began
    assert seed == 1584714016
    assert (
        sampling_seed(0, replace(SESSION, id="x", key="x", base_url="x"), PROMPT, 1)
        == seed
    )
    others = [
        sampling_seed(1, SESSION, PROMPT, 1),
        sampling_seed(0, SESSION, PROMPT[::-1], 1),
        sampling_seed(0, SESSION, PROMPT, 2),
        *(
            sampling_seed(0, replace(SESSION, **{name: value}), PROMPT, 1)
            for name, value in {
                "purpose": "eval",
                "group_id": "g8",
                "index": 4,
                "attempt": 1,
            }.items()
        ),
    ]
    assert len({seed, *others}) == 1 + 7
    drawn = [sampling_seed(0, SESSION, PROMPT, nth) for nth in range(4000)]
    assert all(0 <= drawn_seed < 2**31 for drawn_seed in drawn)
    assert len(set(drawn)) == 4000
    for bit in range(31):
        # 4000 fair coins: 6 standard deviations are 190
        assert abs(sum(drawn_seed >> bit & 1 for drawn_seed in drawn) - 2000) < 190


async def test_the_gateway_sends_a_seed_with_each_generation(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
) -> None:
    async with running(tmp_path, model, renderer, sampling_seed=5) as gateway:
        # One answer to all, so that the prompts of the second turns are equal too.
        gateway.engine.script = lambda _: [40, 41, 2]

        async def seeds(session: Session, *, seed: int | None = None) -> list[int]:
            """Of a question, the next turn, the question anew (a fresh
            conversation)."""
            before = len(gateway.engine.requests)
            client = gateway.client(session)
            extra = {} if seed is None else {"seed": seed}
            first = await client.chat.completions.create(
                model="tiny", messages=[ASK], **extra
            )
            reply = {"role": "assistant", "content": first.choices[0].message.content}
            for messages in ([ASK, reply, MORE], [ASK]):
                # The same question again is a retry, unless the client says otherwise.
                await client.chat.completions.create(
                    model="tiny",
                    messages=messages,
                    extra_headers={"x-stainless-retry-count": "0"},
                    **extra,
                )
            sent = gateway.engine.requests[before:]
            return [request["sampling_params"]["sampling_seed"] for request in sent]

        first, second = await gateway.open(members=2)
        [replaced] = await gateway.open(group_id="g", members=1)
        [served] = await gateway.open(purpose="serve")
        of_first = await seeds(first)
        assert len(set(of_first)) == 3
        assert all(isinstance(sent_seed, int) for sent_seed in of_first)
        assert not set(await seeds(second)) & set(of_first)
        # the same place; training does not ask the client
        assert await seeds(replaced, seed=9) == of_first
        assert await seeds(served, seed=9) == [9, 9, 9]
        [reordered] = await gateway.open()
        for message in (MORE, ASK):  # as requests that were sent at once may arrive
            await gateway.client(reordered).chat.completions.create(
                model="tiny", messages=[message]
            )
        assert (
            gateway.engine.requests[-1]["sampling_params"]["sampling_seed"]
            == of_first[0]
        )
        assert not {9, *of_first} & set(
            await seeds((await gateway.open(purpose="serve"))[0])
        )
