"""--megatron-*: what passes is parsed as the installed package types it; what must not
pass says why."""

from __future__ import annotations

import re

import pytest
import torch

from invrl.errors import ConfigError
from invrl.run.settings.other_trainers import ANSWERS
from invrl.train.config import TrainConfig
from invrl.train.runtime.megatron_args import (
    MegatronOptions,
    Scalar,
    check_megatron_options,
    fix_of_field,
    parse_megatron_options,
)


def test_megatron_values_are_converted_to_the_type_of_their_field() -> None:
    options = parse_megatron_options(
        {
            "recompute_granularity": "selective",
            "recompute_modules": "core_attn,mlp",
            "recompute_num_layers": "2",
            "adam_eps": "1e-6",
            "bucket_size": 1000,
            "deterministic_mode": "true",
            "config_logger_dir": "x",
        }
    )
    assert options.transformer == {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp"],
        "recompute_num_layers": 2,
        "deterministic_mode": True,
        "config_logger_dir": "x",
    }
    assert options.ddp == {"bucket_size": 1000}
    assert options.optimizer == {"adam_eps": 1e-6, "config_logger_dir": "x"}


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("lr", 1e-3, "--lr"),
        ("bf16", True, "--train-dtype"),
        ("use_distributed_optimizer", True, "--use-distributed-optimizer"),
        ("adam_beta2", 0.9, "--adam-beta2"),
        ("hidden_size", 64, "config.json"),
        ("hidden_dropout", 0.1, "config.json"),
        ("softmax_type", "off-by-one", "config.json"),
        ("calculate_per_token_loss", False, "training step"),
        ("overlap_param_gather", True, "go to the engines"),
        ("expert_tensor_parallel_size", 2, "save every expert whole"),
        ("optimizer_cpu_offload", True, "--optimizer-cpu-offload"),
        ("optimizer_offload_fraction", 0.5, "needs TransformerEngine"),
        ("tensor_model_parallel_size", 2, "--tensor-model-parallel-size"),
        ("sequence_parallel", True, "--tensor-model-parallel-size"),
        ("expert_model_parallel_size", 2, "--expert-model-parallel-size"),
        ("moe_router_bias_update_rate", 0.1, "--moe-router-bias-update-rate"),
        ("pipeline_model_parallel_size", 2, "--pipeline-model-parallel-size"),
        ("moe_router_topk", 2, "not built"),
        ("fp8", "hybrid", "not built"),
        ("optimizer", "muon", "not built"),
        ("main_params_dtype", "float16", "not built"),
        ("gradient_accumulation_fusion", True, "not built"),
        ("decoupled_lr", 1e-3, "not built"),
        ("recompute_granuarity", "full", "--megatron-recompute-granularity"),
        ("recompute_granularity", "all", "Literal"),
        ("recompute_num_layers", "many", "int"),
        ("deterministic_mode", "perhaps", "bool"),
    ],
)
def test_refused_megatron_options_name_the_fix(
    name: str, value: Scalar, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_megatron_options({name: value})
    assert told in str(caught.value)
    assert "--megatron-" + name.replace("_", "-") in str(caught.value)


def test_megatrons_cpu_offloaded_optimizer_cannot_load_its_state() -> None:
    """Why `--optimizer-cpu-offload` is not Megatron's. Where this fails, a newer Megatron
    may have it."""
    from invrl.train.runtime import device

    device.prepare()
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    master_weight = torch.nn.Parameter(torch.ones(4))
    optimizer = HybridDeviceOptimizer(
        [master_weight],
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,  # as Megatron always sets it
        lr=1e-3,
    )
    moments = {
        "exp_avg": torch.zeros(4),
        "exp_avg_sq": torch.zeros(4),
        "step": torch.tensor(1.0),
    }
    optimizer.state[master_weight] = {**moments, "master_param": torch.ones(4)}
    with pytest.raises(KeyError):
        optimizer.load_state_dict(optimizer.state_dict())
    # it compares the version of TransformerEngine, which has none
    with pytest.raises(TypeError):
        OptimizerConfig(
            optimizer="adam",
            bf16=True,
            use_distributed_optimizer=True,
            optimizer_cpu_offload=True,
            use_precision_aware_optimizer=True,
        )


ACCEPTED: dict[str, Scalar] = {
    "recompute_granularity": "full",
    "recompute_method": "block",
    "recompute_modules": "mlp",
    "config_logger_dir": "folder",
}
"""A value for each accepted field that no number and no truth value fits."""


def parsed_or_refused(name: str, value: Scalar) -> MegatronOptions | ConfigError:
    try:
        return parse_megatron_options({name: value})
    except ConfigError as error:
        return error


def test_every_megatron_field_is_accepted_with_its_type_or_refused() -> None:
    """Also those of a Megatron that this test has never seen."""
    from dataclasses import fields

    from invrl.train.runtime import device

    device.prepare()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes = {
        "transformer": TransformerConfig,
        "ddp": DistributedDataParallelConfig,
        "optimizer": OptimizerConfig,
    }
    owners: dict[str, set[str]] = {}
    for owner, cls in classes.items():
        for field in fields(cls):
            owners.setdefault(field.name, set()).add(owner)
    accepted: set[str] = set()
    for name, expected in owners.items():
        flag = "--megatron-" + name.replace("_", "-")
        for value in (ACCEPTED.get(name, 2), True):
            answer = parsed_or_refused(name, value)
            if isinstance(answer, ConfigError):
                assert answer.field == flag
                assert answer.fix
            else:
                assert {
                    owner for owner in classes if name in getattr(answer, owner)
                } == expected
                accepted.add(name)
    print(f"{len(owners)} options walked: {len(accepted)} accepted")
    # What a run may change is a short list; a field new to Megatron is refused until it
    # is looked at.
    assert 15 <= len(accepted) <= 25
    assert ACCEPTED.keys() <= accepted


def test_accepted_megatron_options_build_megatrons_classes_or_report_what_is_missing() -> (
    None
):
    check_megatron_options(
        {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 2,
        }
    )
    with pytest.raises(ConfigError, match="recompute_method") as caught:
        check_megatron_options({"recompute_granularity": "full"})
    assert caught.value.fix


UNIFORM: dict[str, Scalar] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (UNIFORM | {"recompute_num_layers": 0}, "no layer would be recomputed"),
        (UNIFORM | {"recompute_num_layers": 4}, "the 6 layers of a rank's chunk"),
        (
            {
                "recompute_granularity": "selective",
                "recompute_modules": "core_attn,layernorm",
            },
            "TransformerEngine",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": "moe_act"},
            "moe_grouped_gemm",
        ),
    ],
)
def test_recomputation_that_would_fail_in_the_first_step_is_refused(
    options: dict[str, Scalar], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        check_megatron_options(options, num_layers=12, chunk_sizes=[6, 4])
    assert caught.value.fix


@pytest.mark.parametrize("num_layers", [1, 2, 3, 6])
def test_units_of_recomputation_that_divide_a_chunk_are_accepted(
    num_layers: int,
) -> None:
    check_megatron_options(
        UNIFORM | {"recompute_num_layers": num_layers}, num_layers=12, chunk_sizes=[6]
    )


def test_refused_megatron_field_names_an_existing_flag() -> None:
    from invrl.train.runtime.megatron_args import _BY_FLAG

    flags = {"--" + name.replace("_", "-") for name in TrainConfig.model_fields}
    assert set(_BY_FLAG.values()) <= flags


def test_fields_that_foreign_names_are_answered_with_may_be_set() -> None:
    answers = " ".join(ANSWERS.values())
    options = set(re.findall(r"--megatron-([a-z0-9-]*[a-z0-9])", answers))
    assert options
    for option in options:
        assert fix_of_field(option.replace("-", "_")) == f"write --megatron-{option}"
    assert fix_of_field("lr") == fix_of_field("no_such_field") == ""
