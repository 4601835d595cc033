"""Trainer and engine compute the same model: weight updates from the real trainer into a real engine, for
every family but Llama and Qwen3, which other tests of engines use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from family_models import make_family_model
from numpy.typing import NDArray
from rank_pool import RankPool, Trainer
from safetensors.torch import load_file
from train_reference import random_batch

from invrl.engines.config import EngineConfig
from invrl.engines.fleet import Fleet
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.model_folder import tensor_files
from invrl.train.config import TrainConfig
from invrl.train.hf_config import read_hf_config
from invrl.types import WeightVersion
from invrl.weights.tensor_spec import checksum
from invrl.weights.transaction import CanaryBound, WeightTransaction

PROMPTS = [list(range(20, 50)), [5, 400, 33, 33, 90, 100, 511, 7, 9, 300, 301, 302]]
"""Longer than the windows of the small models."""


class PoolSender:
    """The trainer's end of weight updates, over ranks in the pool."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    async def layout(self) -> WeightLayout:
        return self._trainer.each("layout")[0]

    async def stage(self, version: WeightVersion) -> StagedWeights:
        return self._trainer.each("stage", version)[0]

    async def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        return self._trainer.logprobs(prompts)


def checksums_of(model: Path) -> dict[str, str]:
    """Of the tensors of a folder whose weights are in several files, by name."""
    files = set(tensor_files(model).values())
    assert len(files) > 1
    return {name: checksum(tensor) for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma3_text", {}),
        ("glm4_moe", {"moe_intermediate_size": 128}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"head_dim": 16}),
        ("qwen3_moe", {"mlp_only_layers": [], "moe_intermediate_size": 128}),
    ],
    ids=["gemma3_text", "glm4_moe", "mistral", "qwen2", "qwen3_moe"],
)
async def test_an_engine_computes_what_the_trainer_computes(
    pool: RankPool, tmp_path: Path, family: str, fields: dict[str, object]
) -> None:
    """The engine starts from the trainer's export in several files. SGLang on CPU pads the experts' sizes to
    a multiple of 64, so they have one here."""
    model = make_family_model(tmp_path / "model", family, **fields)  # pyright: ignore[reportArgumentType]
    shape = read_hf_config(model)
    shape.check_served()
    experts = shape.experts
    moves_bias = experts is not None and experts.has_bias
    train = TrainConfig(
        train_dtype="float32",
        lr=5e-3,
        moe_router_bias_update_rate=0.05 if moves_bias else 0.0,
        max_shard_gb=2e-4,
    )
    trainer = pool.build(model, train=train)
    trainer.train(random_batch(0))
    exported = tmp_path / "exported"
    trainer.each("export", str(exported))
    assert trainer.each("staged", 0)[0] == checksums_of(exported)
    expected = trainer.logprobs(PROMPTS)
    config = EngineConfig(
        engine_dtype="float32", engine_start_timeout_s=500.0, engine_health_interval_s=86_400.0
    )
    fleet = Fleet(config, exported, tmp_path / "fleet")
    await fleet.start()
    try:
        await fleet.admit()
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
            update = await transaction.run(WeightVersion(version))
            assert update.lost_engines == {}
            assert update.canary_max_gap <= 1e-4
    finally:
        await fleet.stop()
