"""The layout of ranks: coordinates as Megatron's, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import make_family_model
from tiny_model import make_tiny_model

from invrl.errors import ConfigError
from invrl.families.hf_config import read_hf_config
from invrl.families.model_config import HuggingFaceConfig
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import Coordinates, ParallelLayout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceConfig:
    """6 layers, 8 heads, 4 of them with keys and values, an MLP of 128, a vocabulary of
    512."""
    folder = tmp_path_factory.mktemp("model")
    return read_hf_config(
        make_tiny_model(
            folder, layers=6, heads=8, kv_heads=4, head_dim=16, vocab_size=512
        )
    )


def test_layout_follows_from_the_settings() -> None:
    train = TrainConfig(
        tensor_model_parallel_size=4,
        context_parallel_size=2,
        data_parallel_size=3,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=5,
        num_layers_in_first_pipeline_stage=10,
        num_layers_in_last_pipeline_stage=15,
    )
    assert train.layout == ParallelLayout(
        tensor=4,
        context=2,
        data=3,
        pipeline=2,
        virtual_pipeline=5,
        first_stage_layers=10,
        last_stage_layers=15,
    )
    assert train.layout.world_size == 48
    assert TrainConfig().layout.world_size == 1


def test_context_parallel_ranks_share_a_micro_batch() -> None:
    train = TrainConfig(max_tokens_per_micro_batch=100, context_parallel_size=3)
    assert train.micro_batch_tokens == 300


def test_coordinates_count_tensor_then_context_then_data_then_pipeline() -> None:
    layout = ParallelLayout(tensor=2, context=2, data=3, pipeline=2, expert=6)
    coordinates = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert coordinates == [
        Coordinates(
            tensor=tensor,
            context=context,
            data=data,
            pipeline=pipeline,
            expert=(tensor + 2 * context + 4 * data) % 6,
        )
        for pipeline in range(2)
        for data in range(3)
        for context in range(2)
        for tensor in range(2)
    ]


def test_each_rank_belongs_to_the_replica_of_its_data_coordinate() -> None:
    layout = ParallelLayout(tensor=2, context=2, data=3, pipeline=2)
    for data in range(3):
        ranks = layout.replica(data)
        assert list(ranks) == sorted(ranks)
        assert {layout.coordinates(rank).data for rank in ranks} == {data}
        assert layout.reporter(data) in ranks
        assert layout.coordinates(layout.reporter(data)).pipeline == 1
    assert sorted(rank for data in range(3) for rank in layout.replica(data)) == list(
        range(24)
    )


@pytest.mark.parametrize(
    ("layout", "copies"),
    [
        (ParallelLayout(tensor=2, data=2, expert=2), [[0, 1], [2, 3]]),
        (ParallelLayout(data=4, expert=2), [[0, 1], [2, 3]]),
        (ParallelLayout(tensor=2, data=2, expert=4), [[0, 1, 2, 3]]),
        (ParallelLayout(data=2, pipeline=2, expert=2), [[0, 1, 2, 3]]),
        (ParallelLayout(data=2, pipeline=2), [[0, 2], [1, 3]]),
    ],
)
def test_expert_parallel_ranks_hold_one_copy_of_the_experts(
    layout: ParallelLayout, copies: list[list[int]]
) -> None:
    for data in range(layout.data):
        [copy] = [copy for copy in copies if layout.replica(data)[0] in copy]
        assert list(layout.model_copy(data)) == copy
        stages = [
            [rank for rank in copy if layout.coordinates(rank).pipeline == stage]
            for stage in range(2)
        ]
        for ranks in stages[: layout.pipeline]:
            assert {layout.coordinates(rank).expert for rank in ranks} == set(
                range(layout.expert)
            )


@pytest.mark.parametrize(
    ("layout", "family", "reason", "fix"),
    [
        (
            ParallelLayout(data=2, expert=2),
            "qwen3",
            "no experts",
            "leave --expert-model-parallel-size out",
        ),
        (ParallelLayout(data=3, expert=3), "qwen3_moe", "8 experts", "may be only 1"),
        (
            ParallelLayout(data=4, expert=8),
            "qwen3_moe",
            "4 ranks of a pipeline stage",
            "1, 2 or 4",
        ),
        (
            ParallelLayout(tensor=4, data=3, expert=6),
            "qwen3_moe",
            "divide or be a multiple of 4, ",
            "1, 2, 4 or 12",
        ),
    ],
)
def test_expert_parallel_ranks_that_do_not_fit_are_refused(
    tmp_path: Path, layout: ParallelLayout, family: str, reason: str, fix: str
) -> None:
    fields: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
    if family == "qwen3_moe":
        fields["num_experts"] = 12 if layout.expert == 6 else 8
    shape = read_hf_config(make_family_model(tmp_path / "model", family, **fields))
    with pytest.raises(ConfigError) as refused:
        layout.check(shape)
    assert refused.value.field == "train.expert_model_parallel_size"
    assert reason in refused.value.reason
    assert fix in refused.value.fix


@pytest.mark.parametrize(
    ("stages", "chunks", "first", "last"),
    [
        *[(1, 1, 0, 0), (3, 1, 0, 0), (2, 3, 0, 0), (3, 2, 0, 0)],
        *[
            (2, 1, 0, 5),
            (2, 1, 9, 3),
            (4, 1, 4, 2),
            (4, 1, 0, 3),
            (3, 2, 4, 0),
            (3, 2, 4, 2),
            (2, 2, 0, 4),
        ],
    ],
)
def test_pipeline_stages_have_the_layers_of_megatron(
    stages: int, chunks: int, first: int, last: int
) -> None:
    from invrl.train.runtime import device

    device.prepare()
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=12,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        num_layers_in_first_pipeline_stage=first or None,
        num_layers_in_last_pipeline_stage=last or None,
        pipeline_dtype=torch.float32,
    )
    layout = ParallelLayout(
        pipeline=stages,
        virtual_pipeline=chunks,
        first_stage_layers=first,
        last_stage_layers=last,
    )
    sizes: set[int] = set()
    for stage in range(stages):
        offsets = [
            get_transformer_layer_offset(config, chunk if chunks > 1 else None, stage)
            for chunk in range(chunks)
        ]
        layers = layout.stage_layers(stage, 12)
        assert [chunk_layers.start for chunk_layers in layers] == offsets
        size = get_num_layers_to_build(config, 0 if chunks > 1 else None, stage)
        assert {len(chunk_layers) for chunk_layers in layers} == {size}
        sizes.add(size)
    assert layout.chunk_sizes(12) == sizes


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_a_layout_that_divides_the_model_is_accepted(
    model: HuggingFaceConfig, tensor: int
) -> None:
    ParallelLayout(tensor=tensor, data=7).check(model)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (8, "num_key_value_heads 4"),
        (3, "num_attention_heads 8, num_key_value_heads 4"),
        (16, "heads 8"),
    ],
)
def test_layout_that_does_not_divide_the_model_is_refused_with_fitting_numbers(
    model: HuggingFaceConfig, tensor: int, reason: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        ParallelLayout(tensor=tensor).check(model)
    assert refused.value.field == "train.tensor_model_parallel_size"
    assert refused.value.value == tensor
    assert reason in refused.value.reason
    assert refused.value.fix == "--tensor-model-parallel-size may be 1, 2 or 4"


def test_model_that_no_layout_divides_is_refused(tmp_path: Path) -> None:
    odd = read_hf_config(
        make_tiny_model(tmp_path, heads=3, kv_heads=3, head_dim=16, vocab_size=513)
    )
    with pytest.raises(ConfigError, match="may be only 1"):
        ParallelLayout(tensor=2).check(odd)


@pytest.mark.parametrize(
    ("layout", "field", "reason", "fix"),
    [
        (
            ParallelLayout(pipeline=4),
            "train.pipeline_model_parallel_size",
            "6 layers",
            "may be 1, 2, 3 or 6; or --num-layers-in-last-pipeline-stage 3 fits",
        ),
        (
            ParallelLayout(pipeline=7),
            "train.pipeline_model_parallel_size",
            "6 layers",
            "--pipeline-model-parallel-size may be 1, 2, 3 or 6",
        ),
        (
            ParallelLayout(pipeline=2, first_stage_layers=2, last_stage_layers=2),
            "train.num_layers_in_last_pipeline_stage",
            "have 4 of the model's 6 layers, and there is no other stage",
            "--num-layers-in-last-pipeline-stage 4 fits",
        ),
        (
            ParallelLayout(pipeline=3, first_stage_layers=1),
            "train.num_layers_in_first_pipeline_stage",
            "the 2 other pipeline stages cannot have equal parts of the 5 layers",
            "--num-layers-in-first-pipeline-stage 2 fits",
        ),
        (
            ParallelLayout(pipeline=2, last_stage_layers=6),
            "train.num_layers_in_last_pipeline_stage",
            "have 6 of the model's 6 layers, and other stages (1) need layers too",
            "--num-layers-in-last-pipeline-stage 3 fits",
        ),
        (
            ParallelLayout(last_stage_layers=6),
            "train.num_layers_in_last_pipeline_stage",
            "only one pipeline stage",
            "set --pipeline-model-parallel-size",
        ),
        (
            ParallelLayout(pipeline=2, virtual_pipeline=2, last_stage_layers=1),
            "train.virtual_pipeline_model_parallel_size",
            "the 5 layers of a pipeline stage",
            "may be only 1",
        ),
        (
            ParallelLayout(pipeline=2, virtual_pipeline=2),
            "train.virtual_pipeline_model_parallel_size",
            "the 3 layers of a pipeline stage",
            "--virtual-pipeline-model-parallel-size may be 1 or 3",
        ),
        (
            ParallelLayout(virtual_pipeline=2),
            "train.virtual_pipeline_model_parallel_size",
            "only one pipeline stage",
            "set --pipeline-model-parallel-size",
        ),
    ],
)
def test_stages_that_do_not_divide_the_layers_are_refused(
    model: HuggingFaceConfig, layout: ParallelLayout, field: str, reason: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        layout.check(model)
    assert refused.value.field == field
    assert reason in refused.value.reason
    assert fix in refused.value.fix


def test_routing_replay_needs_a_model_with_experts(
    model: HuggingFaceConfig, tmp_path: Path
) -> None:
    train = TrainConfig(routing_replay="trainer")
    with pytest.raises(
        ConfigError, match="no experts, so there is no routing to replay"
    ):
        train.check_model(model)
    train.check_model(
        read_hf_config(make_family_model(tmp_path / "model", "qwen3_moe"))
    )
