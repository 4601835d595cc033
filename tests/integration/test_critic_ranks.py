"""A critic on ranks of its own, as Ray actors, beside the critic that shares the
policy's ranks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from rank_pool import Arrays, RankPool
from slow_cases import first_quick
from test_critic import BATCHES, BOUND, EXACT, with_critic
from tiny_model import make_tiny_model
from train_reference import check_same_bits, random_batch, worst

from invrl.errors import ServerError, TrainError
from invrl.host.processes.process import random_key, still_running
from invrl.host.ray.actor import ActorOptions, start_actor
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.train.critic.critic_actor import CriticActor
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.rank_settings import RankSettings
from invrl.train.ranks.rank_group import RankGroup
from invrl.train.trainer.train_actor import TrainActor
from invrl.train.trainer.train_handle import TrainHandle
from invrl.types.metrics import Metric, resolve

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("ray_session")
STEPS = 2
WARM_UP = {"warmup_steps": 1}
"""Settings of the critic."""
COMPARED = (
    *(
        "value_loss",
        "value_mean",
        "return_mean",
        "value_explained_variance",
        "kl_in_reward",
    ),
    *(
        "critic_grad_norm",
        "grad_norm",
        "loss",
        "critic_lr",
        "critic_steps",
        "optimizer_steps",
    ),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


@asynccontextmanager
async def beside_critic(
    model: Path,
    *,
    policy: ParallelLayout,
    critic: ParallelLayout,
    warm_up: Mapping[str, object] = WARM_UP,
) -> AsyncIterator[TrainHandle]:
    """Ranks that have started. Those that are left are killed at the end."""
    algorithm = with_critic(**warm_up, data_parallel_size=critic.data)

    def settings(layout: ParallelLayout, store_key: str) -> list[RankSettings]:
        return [
            RankSettings(
                rank=rank,
                layout=layout,
                master_addr="127.0.0.1",
                store_key=store_key,
                model_path=str(model),
                train=EXACT,
                algorithm=algorithm,
                weight_dtype="float32",
            )
            for rank in range(layout.world_size)
        ]

    of_policy = settings(policy, random_key())
    of_critic = settings(critic, random_key())
    handle = TrainHandle(
        [
            start_actor(f"trainer rank {one.rank}", TrainActor, ActorOptions(), one)
            for one in of_policy
        ],
        layout=policy,
        critic=RankGroup(
            actors=[
                start_actor(f"critic rank {one.rank}", CriticActor, ActorOptions(), one)
                for one in of_critic
            ],
            layout=critic,
        ),
        num_mini_batches=STEPS,
        start_timeout_s=300.0,
        step_timeout_s=300.0,
        heartbeat_timeout_s=3.0,
    )
    await handle.start()
    try:
        yield handle
    finally:
        handle.stop()


def processes_of(handle: TrainHandle) -> list[psutil.Process]:
    """Those of the policy, then those of the critic."""
    handles = [actor.ray_handle for actor in handle._everyone.actors]
    pids = ray.get(
        [one.__ray_call__.remote(lambda self: os.getpid()) for one in handles],
        timeout=120,
    )
    return [psutil.Process(pid) for pid in pids]


def compared(metrics: Mapping[str, Metric]) -> dict[str, float]:
    numbers = resolve(metrics)
    return {name: numbers[name] for name in COMPARED if name in numbers}


def assert_same(found: Arrays, expected: Arrays, *, exactly: bool) -> None:
    if exactly:
        assert found.keys() == expected.keys()
        check_same_bits(found, expected)
        return
    gap, name = worst(found, expected)
    assert gap < BOUND, name


@pytest.mark.parametrize(
    ("policy", "critic"),
    first_quick(
        [
            (ParallelLayout(), ParallelLayout()),
            (ParallelLayout(), ParallelLayout(data=2)),
            (ParallelLayout(data=2), ParallelLayout()),
            (ParallelLayout(pipeline=2), ParallelLayout(pipeline=2)),
        ]
    ),
    ids=["1 and 1", "1 and 2", "2 and 1", "stages"],
)
async def test_critic_on_its_own_ranks_learns_what_a_shared_critic_learns(
    pool: RankPool,
    model: Path,
    tmp_path: Path,
    policy: ParallelLayout,
    critic: ParallelLayout,
) -> None:
    """With the policy's layout the same bit for bit; with another one gradients add up
    in another order. The first batch is the critic's alone. The checkpoint is then
    loaded by a critic on the policy's ranks."""
    shared = pool.build(
        model, layout=policy, train=EXACT, algorithm=with_critic(**WARM_UP)
    )
    expected = [compared(shared.train(batch, steps=STEPS)) for batch in BATCHES[:2]]
    weights, critic_weights = shared.weights(), shared.critic_weights()
    assert [numbers["optimizer_steps"] for numbers in expected] == [0, STEPS]

    exactly = policy == critic
    async with beside_critic(model, policy=policy, critic=critic) as handle:
        for batch, numbers in zip(BATCHES[:2], expected, strict=True):
            result = await handle.train(batch)
            assert compared(result.metrics) == pytest.approx(
                numbers, rel=0 if exactly else 1e-4
            )
            assert result.optimizer_steps == numbers["optimizer_steps"]
            assert result.seconds.keys() >= {"values", "critic", "reference"}
            records = result.token_records
            assert len(records) == len(batch.samples)
            if not numbers["optimizer_steps"]:
                assert set(records) == {None}
        trained = BATCHES[1]
        for sample, given_T, record in zip(
            trained.samples, trained.advantages, records, strict=True
        ):
            if sample.loss_mask_T.any():
                assert record is not None
                assert (
                    record.advantages_N.shape
                    == record.logprobs_N.shape
                    == (sample.loss_mask_T.sum(),)
                )
                # The critic's, not those that came with the batch.
                assert not np.allclose(record.advantages_N, given_T[sample.loss_mask_T])
        await handle.save_checkpoint(str(tmp_path / "saved"))
    loaded = pool.build(
        model, layout=policy, train=EXACT, algorithm=with_critic(**WARM_UP)
    )
    loaded.each("load", str(tmp_path / "saved"))
    assert_same(loaded.weights(), weights, exactly=exactly)
    assert_same(loaded.critic_weights(), critic_weights, exactly=exactly)


@pytest.mark.slow
async def test_checkpoint_is_loaded_by_another_number_of_critic_ranks(
    pool: RankPool, model: Path, tmp_path: Path
) -> None:
    """Written beside training by one rank of the critic, loaded by two; and that of a
    shared critic."""
    one = ParallelLayout()
    saving = Checkpoints(tmp_path / "checkpoints")
    async with beside_critic(model, policy=one, critic=one) as handle:
        for batch in BATCHES[:2]:
            await handle.train(batch)
        await saving.save_beside_training(handle, 1, b"the buffer")
        uninterrupted = compared((await handle.train(BATCHES[2])).metrics)
        await saving.wait_until_saved()
    saved = saving.newest_whole(pytest.fail, model)
    assert saved is not None
    assert (saved.megatron / "critic" / "metadata.json").exists()

    shared = pool.build(model, train=EXACT, algorithm=with_critic(**WARM_UP))
    for batch in BATCHES[:2]:
        shared.train(batch, steps=STEPS)
    shared.each("save", str(tmp_path / "shared"))
    for folder in (saved.megatron, tmp_path / "shared"):
        async with beside_critic(
            model, policy=one, critic=ParallelLayout(data=2)
        ) as handle:
            await handle.load_checkpoint(str(folder))
            resumed = compared((await handle.train(BATCHES[2])).metrics)
        assert resumed == pytest.approx(uninterrupted, rel=1e-4), folder


@pytest.mark.slow
async def test_critic_ranks_refuse_a_checkpoint_without_a_critic(
    pool: RankPool, model: Path, tmp_path: Path
) -> None:
    pool.build(model, train=EXACT).each("save", str(tmp_path / "saved"))
    async with beside_critic(
        model, policy=ParallelLayout(), critic=ParallelLayout()
    ) as handle:
        processes = processes_of(handle)
        with pytest.raises(TrainError, match="holds no critic"):
            await handle.load_checkpoint(str(tmp_path / "saved"))
        assert still_running(processes, within_s=60) == []


@pytest.mark.slow
async def test_death_of_a_critic_rank_ends_all_ranks_and_a_silent_rank_is_named(
    model: Path,
) -> None:
    one = ParallelLayout()
    long = random_batch(1, groups=12, rollouts=40, prompt=300)
    async with beside_critic(model, policy=one, critic=one) as handle:
        processes = processes_of(handle)
        training = asyncio.create_task(handle.train(long))
        await asyncio.sleep(0.1)
        assert not training.done()
        processes[1].kill()
        with pytest.raises(TrainError, match="critic rank 0 failed in prepare"):
            await training
        assert still_running(processes, within_s=60) == []
    async with beside_critic(model, policy=one, critic=one) as handle:
        processes = processes_of(handle)
        watch = asyncio.create_task(handle.watch())
        await handle.train(BATCHES[0])
        assert not watch.done()
        processes[1].suspend()
        with pytest.raises(
            ServerError,
            match=r"critic rank 0 \(process \d+ on .*\) has not answered for 3",
        ):
            await asyncio.wait_for(watch, 120)
        handle.stop()
        assert still_running(processes, within_s=60) == []
