"""All ranks behind one handle, as Ray actors: they train together, and they end
together."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from family_models import make_family_model
from rank_pool import RankPool
from safetensors.torch import load_file
from slow_cases import first_quick
from tiny_model import make_tiny_model
from train_reference import random_batch

from invrl.algorithms.config import AlgorithmConfig
from invrl.errors import ConfigError, DeadlineError, ServerError, TrainError
from invrl.host.processes.process import still_running
from invrl.host.ray.actor import ActorHandle, ActorOptions, start_actor
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.rank_settings import RankSettings
from invrl.train.trainer.train_actor import TrainActor
from invrl.train.trainer.train_handle import TrainHandle
from invrl.types.metrics import resolve

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("ray_session")
TRAIN = TrainConfig(train_dtype="float32", data_parallel_size=2, lr=1e-3)


DP2 = ParallelLayout(data=2)


def handle_of(
    actors: Sequence[ActorHandle[TrainActor]],
    *,
    steps: int,
    layout: ParallelLayout = DP2,
) -> TrainHandle:
    return TrainHandle(
        actors,
        layout=layout,
        num_mini_batches=steps,
        start_timeout_s=300.0,
        step_timeout_s=300.0,
    )


def processes_of(actors: Sequence[ActorHandle[TrainActor]]) -> list[psutil.Process]:
    handles = [actor.ray_handle for actor in actors]
    pids = ray.get(
        [handle.__ray_call__.remote(lambda self: os.getpid()) for handle in handles],
        timeout=120,
    )
    return [psutil.Process(pid) for pid in pids]


LAST_WORDS = r"Last lines of worker-\S+\.err \(in logs/ray\):\nthe last words of a rank"
"""A rank that works prints nothing else: neither Ray's marks nor warnings that every
rank gives are shown."""


def say_last_words(actor: ActorHandle[TrainActor]) -> None:
    def say(_: object) -> None:
        print("the last words of a rank", file=sys.stderr, flush=True)

    ray.get(actor.ray_handle.__ray_call__.remote(say), timeout=120)


def rank_actors(
    model: Path, layout: ParallelLayout = DP2
) -> list[ActorHandle[TrainActor]]:
    return [
        start_actor(
            f"trainer rank {rank}",
            TrainActor,
            ActorOptions(),
            RankSettings(
                rank=rank,
                layout=layout,
                master_addr="127.0.0.1",
                store_key="k",
                model_path=str(model),
                train=TRAIN,
                algorithm=AlgorithmConfig(num_mini_batches=2),
                weight_dtype="float32",
            ),
        )
        for rank in range(layout.world_size)
    ]


@pytest.mark.parametrize(
    "layout",
    first_quick(
        [
            DP2,
            ParallelLayout(tensor=2),
            ParallelLayout(pipeline=2),
            ParallelLayout(data=2, expert=2),
        ]
    ),
    ids=["data", "tensor", "pipeline", "expert"],
)
async def test_two_ranks_train_and_the_death_of_a_rank_ends_both(
    pool: RankPool, tmp_path: Path, layout: ParallelLayout
) -> None:
    if layout.expert > 1:
        model = make_family_model(tmp_path / "model", "qwen3_moe")
    else:
        model = make_tiny_model(tmp_path / "model")
    actors = rank_actors(model, layout)
    handle = handle_of(actors, steps=2, layout=layout)
    await handle.start()
    batch = random_batch(0)
    saving = Checkpoints(tmp_path / "checkpoints")
    await saving.save_beside_training(handle, 0, b"the buffer")
    result = await handle.train(batch)
    await saving.wait_until_saved()
    saved = saving.newest_whole(pytest.fail, model)
    assert saved is not None
    untrained = load_file(model / "model.safetensors")
    for name, tensor in load_file(saved.hugging_face / "model.safetensors").items():
        assert torch.equal(tensor, untrained[name]), name
    await saving.save_beside_training(handle, 1, b"the buffer")
    await saving.wait_until_saved()
    assert [checkpoint.step for checkpoint in saving.all()] == [0, 1]
    assert result.optimizer_steps == 2
    assert resolve(result.metrics)["tokens"] == batch.trained.tokens
    assert result.seconds.keys() >= {"old_logprobs", "forward_backward", "optimizer"}
    prompt = batch.samples[0].tokens_T.tolist()
    (logprobs,) = await handle.logprobs([prompt])
    await handle.export_hugging_face(str(tmp_path / "exported"))
    layout = await handle.layout()
    assert (await handle.stage(1)).version == 1
    assert len(layout) > 20

    alone = pool.build(model, train=TRAIN)
    alone.train(batch, steps=2)
    token_logprobs = await handle.token_logprobs(batch)
    for found_T, expected_T in zip(
        token_logprobs, alone.token_logprobs(batch), strict=True
    ):
        assert np.abs(found_T - expected_T).max() < 1e-3
    assert np.abs(alone.logprobs([prompt])[0] - logprobs).max() < 1e-4

    processes = processes_of(actors)
    say_last_words(actors[1])
    long = random_batch(1, groups=12, rollouts=40, prompt=300)
    training = asyncio.create_task(handle.train(long))
    await asyncio.sleep(0.1)
    assert not training.done()
    processes[1].kill()
    with pytest.raises(
        TrainError, match=f"(?s)trainer rank 1 failed in train.*{LAST_WORDS}"
    ):
        await training
    assert still_running(processes, within_s=60) == []


def stand_in(rank: int, behaviour: str) -> ActorHandle[TrainActor]:
    """A rank as Ray sees it: it answers, fails, or waits for its peers for ever."""

    class StandIn:  # local: Ray sends it whole, as workers cannot import this module
        def logprobs(self, prompts: object) -> str:
            return "answered"

        def listen(self) -> int:
            return 1

        def start(self, port: int) -> None:
            if behaviour == "fail":
                raise TrainError("the loss is nan: no weight was changed")
            if behaviour == "refuse":
                raise ConfigError(field="--lr", value=0, reason="too small", fix="more")
            if behaviour == "bug":
                raise ZeroDivisionError("a bug of ours")
            if behaviour == "lose its peer":
                raise ConnectionError("closed by peer")
            if behaviour == "die":
                time.sleep(1.0)  # the peer tells before Ray does
                os._exit(1)
            if behaviour == "wait":
                time.sleep(600)

    return ActorHandle(
        f"trainer rank {rank}", ray.remote(StandIn).options(num_cpus=0).remote()
    )


@pytest.mark.parametrize(
    ("behaviours", "error", "message"),
    [
        (("wait", "fail"), TrainError, "^the loss is nan: no weight was changed$"),
        (("wait", "refuse"), ConfigError, "^--lr = 0: too small. Fix: more$"),
        (("bug", "wait"), TrainError, "trainer rank 0 failed in start.*a bug of ours"),
        (
            ("lose its peer", "die"),
            TrainError,
            "^trainer rank 1 failed in start: ActorDied",
        ),
        (("answer", "wait"), DeadlineError, "1 of 2 trainer ranks to finish start"),
    ],
)
async def test_failure_of_one_rank_at_the_start_leaves_no_rank(
    behaviours: tuple[str, ...], error: type[Exception], message: str
) -> None:
    actors = [stand_in(rank, behaviour) for rank, behaviour in enumerate(behaviours)]
    processes = processes_of(actors)
    # Whoever else waits must not wait for it.
    start_s = 3.0 if error is DeadlineError else 120.0
    handle = TrainHandle(
        actors,
        layout=DP2,
        num_mini_batches=1,
        start_timeout_s=start_s,
        step_timeout_s=60.0,
    )
    assert await handle.logprobs([[1]]) == "answered"
    with pytest.raises(error, match=f"(?s){message}"):
        await handle.start()
    assert still_running(processes, within_s=60) == []


async def test_stopped_rank_is_named_whether_it_works_or_waits(
    pool: RankPool, tmp_path: Path
) -> None:
    """Nobody else would tell: it keeps its sockets, and the other rank waits for it in
    a collective."""
    model = make_tiny_model(tmp_path / "model")
    actors = rank_actors(model)
    handle = TrainHandle(
        actors,
        layout=DP2,
        num_mini_batches=2,
        start_timeout_s=300.0,
        step_timeout_s=300.0,
        heartbeat_timeout_s=3.0,
    )
    await handle.start()
    processes = processes_of(actors)
    watch = asyncio.create_task(handle.watch())
    await handle.train(random_batch(0))
    assert not watch.done(), "a rank that works is alive"
    say_last_words(actors[1])
    processes[1].suspend()
    working = asyncio.create_task(handle.train(random_batch(1)))
    silent = r"(?s)trainer rank 1 \(process \d+ on .*\) has not answered for 3.*"
    with pytest.raises(ServerError, match=silent + LAST_WORDS):
        await asyncio.wait_for(watch, 120)
    with pytest.raises(TrainError, match="trainer rank 1"):
        await working
    handle.stop()
    assert not still_running(processes, within_s=60.0)


async def test_death_of_a_rank_that_others_wait_for_in_a_save_ends_the_save_with_its_name(
    pool: RankPool, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model")
    actors = rank_actors(model)
    handle = handle_of(actors, steps=2, layout=DP2)
    await handle.start()
    await handle.train(random_batch(0))
    processes = processes_of(actors)
    processes[1].suspend()
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    save = asyncio.create_task(checkpoints.save(handle, 0, b"the buffer"))
    await asyncio.sleep(1.0)
    assert not save.done(), "rank 0 waits for rank 1"
    processes[1].kill()
    with pytest.raises(TrainError, match="trainer rank 1 failed in save_checkpoint"):
        await asyncio.wait_for(save, 60)
    assert checkpoints.all() == []
    assert still_running(processes, within_s=60) == []
