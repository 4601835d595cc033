"""Trainer and engine compute the same model: weight updates from the real trainer into
a real engine, for every family but Llama and Qwen3, which other tests of engines
use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import make_family_model
from numpy.typing import NDArray
from pool_sender import PoolSender, folder_checksums
from rank_pool import RankPool, Trainer
from slow_cases import first_quick
from streamed import Generated, collect, generate
from train_reference import random_batch
from transformers import AutoModelForCausalLM

from invrl.engines.client.generation import (
    GenerateChunk,
    GenerateRequest,
)
from invrl.engines.client.routed_experts import ExpertsShape
from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.families.hf_config import read_hf_config
from invrl.host.processes.fork_parent import ForkParent
from invrl.interfaces import StagedWeights
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.routed_experts import unknown_expert
from invrl.types.sessions import Sampling
from invrl.types.weights import WeightUpdate, WeightVersion
from invrl.user_code.model_folder import tensor_files
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.transaction import WeightTransaction

PROMPTS = [list(range(20, 50)), [5, 400, 33, 33, 90, 100, 511, 7, 9, 300, 301, 302]]
"""Longer than the windows of the small models."""
NUM_CROSSING = 500
"""Tokens of a turn that is sampled under two versions: more than an engine samples
before it pauses."""
ROUNDING = 1e-5
"""By how much two computations of one score may differ."""
MOE_LAYOUTS = [
    ParallelLayout(pipeline=2),
    ParallelLayout(data=2, expert=2),
    ParallelLayout(tensor=2, expert=2),
    ParallelLayout(pipeline=2, data=2),
]
"""Those in which a model with experts sends its weights too."""


@pytest.mark.parametrize(
    ("family", "fields"),
    first_quick(
        [
            ("qwen3_moe", {"mlp_only_layers": [], "moe_intermediate_size": 128}),
            ("gemma3_text", {}),
            ("glm4_moe", {"moe_intermediate_size": 128}),
            ("mistral", {"sliding_window": None}),
            ("qwen2", {"head_dim": 16}),
        ]
    ),
    ids=["qwen3_moe", "gemma3_text", "glm4_moe", "mistral", "qwen2"],
)
async def test_engine_of_each_family_computes_the_trainers_logprobs(
    pool: RankPool,
    engine_parent: ForkParent,
    tmp_path: Path,
    family: str,
    fields: dict[str, object],
) -> None:
    """The engine starts from the trainer's export in several files. SGLang on CPU pads
    the experts' sizes to a multiple of 64, so they have one here."""
    model = make_family_model(tmp_path / "model", family, **fields)  # pyright: ignore[reportArgumentType]
    shape = read_hf_config(model)
    shape.check_served()
    experts = shape.experts
    moves_bias = experts is not None and experts.has_bias
    train = TrainConfig(
        train_dtype="float32",
        lr=5e-3,
        moe_router_bias_update_rate=0.05 if moves_bias else None,
        max_shard_gb=2e-4,
    )
    trainer = pool.build(model, train=train)
    trainer.train(random_batch(0))
    exported = tmp_path / "exported"
    trainer.each("export", str(exported))
    assert len(set(tensor_files(exported).values())) > 1
    assert trainer.each("staged", 0)[0] == folder_checksums(exported)
    expected = trainer.logprobs(PROMPTS)
    config = EngineConfig(
        dtype="float32",
        start_timeout_s=500.0,
        health_interval_s=86_400.0,
    )
    has_experts = read_hf_config(model).experts is not None
    fleet = Fleet(
        config,
        exported,
        tmp_path / "fleet",
        record_experts=has_experts,
        parent=engine_parent,
    )
    await fleet.start()
    try:
        await fleet.admit()
        if has_experts:
            await check_recorded_experts(fleet, exported)
        found = await fleet.engines["engine-0"].client.prompt_logprobs(PROMPTS)
        for found_T, expected_T in zip(found, expected, strict=True):
            assert np.abs(found_T - expected_T).max() <= 1e-4
        transaction = WeightTransaction(
            PoolSender(trainer),
            fleet.receivers,
            canary_prompts=PROMPTS,
            bound=CanaryBound.for_dtypes("float32", "float32"),
        )
        for version in (1, 2, 3):
            trainer.train(random_batch(version))
            if moves_bias and version == 1:
                updated = tmp_path / "updated"
                trainer.each("export", str(updated))
                update = await update_in_mid_turn(
                    fleet, transaction, before=exported, after=updated
                )
            else:
                update = await transaction.run(WeightVersion(version))
            assert update.lost_engines == {}
            assert update.canary_max_gap <= 1e-4
        if family == "qwen3_moe":
            for number, layout in enumerate(MOE_LAYOUTS):
                trainer = pool.build(model, layout=layout, train=train)
                folder = tmp_path / f"export-{number}"
                first_version = 4 + 3 * number
                await check_engine_holds_export(
                    trainer, fleet, folder, first_version=first_version
                )
    finally:
        await fleet.stop()


async def check_engine_holds_export(
    trainer: Trainer, fleet: Fleet, folder: Path, *, first_version: int
) -> None:
    """Three updates from these ranks leave the bytes of their own export in the
    engine."""
    [receiver] = await fleet.receivers()
    transaction = WeightTransaction(
        PoolSender(trainer),
        fleet.receivers,
        canary_prompts=PROMPTS,
        bound=CanaryBound.for_dtypes("float32", "float32"),
    )
    for version in range(first_version, first_version + 3):
        trainer.train(random_batch(version))
        update = await transaction.run(WeightVersion(version))
        assert update.canary_max_gap <= 1e-4
    trainer.part(trainer.layout.model_copy(0)).each("export", str(folder))
    staged = StagedWeights(
        version=WeightVersion(0), handle="", checksums={}, num_bytes=0
    )
    assert await receiver.checksums(staged) == folder_checksums(folder)


async def check_recorded_experts(fleet: Fleet, model: Path) -> None:
    """Through the router, of a first turn and of one that continues it: those that
    transformers' routers choose for the same tokens. The engine has the tokens of the
    first turn in its cache."""
    shape = ExpertsShape.of(model)
    router = fleet.router
    client = SglangClient(
        router.url, limits=fleet.limits, api_key=router.api_key, experts=shape
    )
    path: list[int] = []
    records: list[NDArray[np.int64]] = []
    async with client:
        for number, context in enumerate(PROMPTS):
            request = GenerateRequest(
                rid=f"experts-{number}-{np.random.randint(1 << 40)}",
                input_ids_T=np.array([*path, *context], np.int32),
                sampling=Sampling(max_new_tokens=12),
                ignore_eos=True,
                path_tokens=len(path),
            )
            result = await generate(client, request)
            assert result.experts_TLK is not None
            assert len(result.experts_TLK) == len(context) + 12
            records.append(result.experts_TLK.astype(np.int64))
            path += [*context, *result.ids_T.tolist()]
    recorded_TLK = np.concatenate(records)[1:]  # nothing predicted the first token
    assert (
        choice_gap(model, path, recorded_TLK, np.ones(len(recorded_TLK), np.bool_))
        <= ROUNDING
    )


async def update_in_mid_turn(
    fleet: Fleet, transaction: WeightTransaction, *, before: Path, after: Path
) -> WeightUpdate:
    """The first update, made while a turn is sampled. The experts of the tokens sampled
    before it are unknown; those of the context and of the tokens sampled after it are
    what the new model chooses."""
    context = PROMPTS[0]
    request = GenerateRequest(
        rid="mid-turn",
        input_ids_T=np.array(context, np.int32),
        sampling=Sampling(max_new_tokens=NUM_CROSSING),
        ignore_eos=True,
    )
    router = fleet.router
    [receiver] = await fleet.receivers()
    pause = receiver.pause
    begun = asyncio.Event()
    shape = ExpertsShape.of(before)
    client = SglangClient(
        router.url, limits=fleet.limits, api_key=router.api_key, experts=shape
    )
    async with client, asyncio.TaskGroup() as tasks:
        turns: list[asyncio.Task[tuple[list[GenerateChunk], Generated]]] = []

        async def pause_in_mid_turn() -> None:
            turns.append(
                tasks.create_task(collect(client.stream(request), each=begun.set))
            )
            await begun.wait()
            await pause()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(receiver, "pause", pause_in_mid_turn)
            update = await transaction.run(WeightVersion(1))
        [turn] = turns
        _, result = await turn
    assert [span.version for span in result.spans] == [0, 1]
    assert result.experts_TLK is not None
    num_before = len(context) + result.spans[1].start
    known_T = (result.experts_TLK != unknown_expert(result.experts_TLK.dtype)).all(
        (1, 2)
    )
    expected_T = np.ones(len(context) + NUM_CROSSING, np.bool_)
    expected_T[0] = False  # nothing predicted it
    expected_T[len(context) : num_before] = False
    assert np.array_equal(known_T, expected_T)

    ids = [*context, *result.ids_T.tolist()]
    recorded_TLK = result.experts_TLK[1:].astype(np.int64)
    assert choice_gap(after, ids, recorded_TLK, known_T[1:]) <= ROUNDING
    assert choice_gap(before, ids, recorded_TLK, known_T[1:]) > 10 * ROUNDING
    return update


def choice_gap(
    model: Path,
    ids: Sequence[int],
    recorded_TLK: NDArray[np.int64],
    known_T: NDArray[np.bool_],
) -> float:
    """How much lower, at most, transformers' router scores the lowest expert (or group
    of experts) that is on record for a token than the lowest that it chooses itself. 0:
    the same ones; about 1e-7: two scores are equal but for rounding. Of the first layer
    in which they differ: its choices change the layers after it.
    """
    experts = read_hf_config(model).experts
    assert experts is not None
    for layer, scores_TE in transformers_scores(model, ids).items():
        known_TE = scores_TE[:-1][known_T]
        recorded_TK = recorded_TLK[known_T, layer]
        size = known_TE.shape[1] // experts.groups
        known_TGE = known_TE.reshape(-1, experts.groups, size)
        group_TG = np.sort(known_TGE, -1)[..., -2:].sum(-1)
        gap = _gap(group_TG, recorded_TK // size, experts.chosen_groups)
        if gap == 0:
            is_lower_TG = (
                group_TG < np.sort(group_TG, -1)[:, -experts.chosen_groups, None]
            )
            known_TE[np.repeat(is_lower_TG, size, -1)] = -np.inf
            gap = _gap(known_TE, recorded_TK, recorded_TK.shape[1])
        if gap > 0:
            return gap
    return 0.0


def _gap(
    scores_TN: NDArray[np.float32], chosen_TK: NDArray[np.int64], num_highest: int
) -> float:
    """How much lower the lowest chosen score is than that of the last of the
    highest."""
    lowest_T = np.take_along_axis(scores_TN, chosen_TK, -1).min(-1)
    return max(0.0, float((np.sort(scores_TN, -1)[:, -num_highest] - lowest_T).max()))


def transformers_scores(
    model: Path, ids: Sequence[int]
) -> dict[int, NDArray[np.float32]]:
    """Layer -> what the router chooses experts by [T, E], of the layers that have
    experts."""
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    scores: dict[int, NDArray[np.float32]] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(
            gate: torch.nn.Module,
            _: object,
            output: torch.Tensor | tuple[torch.Tensor, ...],
        ) -> None:
            logits_TE = output if isinstance(output, torch.Tensor) else output[0]
            bias_E = getattr(gate, "e_score_correction_bias", None)
            # a softmax leaves the order of logits as it is; a bias is added to the
            # sigmoid
            scores_TE = logits_TE if bias_E is None else logits_TE.sigmoid() + bias_E
            scores[layer] = scores_TE.float().numpy()

        return hook

    config = read_hf_config(model)
    for layer in range(config.num_hidden_layers):
        if config.has_experts(layer):
            hf.model.layers[layer].mlp.gate.register_forward_hook(keep(layer))
    with torch.no_grad():
        hf(torch.tensor([ids]))
    return scores
