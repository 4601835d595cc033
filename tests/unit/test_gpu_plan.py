"""The plan of GPUs: who is on which, what is refused, and how one GPU is divided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from invrl.cli.flags import parse_flags
from invrl.engines.config import EngineConfig
from invrl.engines.launch.engine_launcher import EngineLauncher
from invrl.errors import ConfigError
from invrl.families.hf_config import read_hf_config
from invrl.run.processes.gpu_plan import (
    GpuPlan,
    plan_engines,
    plan_run,
    plan_trainer,
)
from invrl.run.processes.trainer_memory import (
    DividedGpu,
    kv_bytes,
    trainer_memory,
    with_divided_memory,
)
from invrl.run.settings.config import Config, resolve
from invrl.weights.config import ArenaWeights
from invrl.weights.transports.buckets import GPU_BUCKET_BYTES

Plan = Callable[[Config, int], GpuPlan | None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def configured(*flags: str, model: Path = Path("model")) -> Config:
    required = ["--model-path", str(model), "--rollout-function-path", "agent:rollout"]
    return resolve(*parse_flags([*required, *flags]))


def placed(*flags: str, gpus: int, plan: Plan = plan_run) -> tuple[object, object]:
    planned = plan(configured(*flags), gpus)
    assert planned is not None
    return planned.ranks, planned.engines


def refusal(*flags: str, gpus: int, plan: Plan = plan_run) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan(configured(*flags), gpus)
    return caught.value


def test_trainer_ranks_and_engines_have_gpus_of_their_own() -> None:
    assert placed(gpus=2) == ((0,), ((1,),))
    assert placed("--num-engines", "4", gpus=8) == ((0,), ((1,), (2,), (3,), (4,)))
    flags = ("--data-parallel-size", "4", "--num-engines", "2", "--engine.tp-size", "2")
    assert placed(*flags, gpus=8) == ((0, 1, 2, 3), ((4, 5), (6, 7)))


def test_a_critic_with_own_ranks_has_the_gpus_after_the_policy() -> None:
    flags = ("--advantage", "gae", "--critic.data-parallel-size", "2")
    assert placed(*flags, gpus=4) == ((0, 1, 2), ((3,),))


def test_colocated_engines_are_on_the_gpus_of_the_trainer() -> None:
    flags = ("--colocate", "--data-parallel-size", "4", "--engine.tp-size", "2")
    assert placed(*flags, "--num-engines", "2", gpus=4) == (
        (0, 1, 2, 3),
        ((0, 1), (2, 3)),
    )


def test_one_rank_and_one_engine_share_the_only_gpu() -> None:
    plan = plan_run(configured(), 1)
    assert plan is not None
    assert plan.numbers == [0]
    assert plan.shares


def test_commands_without_a_trainer_give_all_gpus_to_engines() -> None:
    flags = ("--num-engines", "2", "--data-parallel-size", "8")
    assert placed(*flags, gpus=2, plan=plan_engines) == ((), ((0,), (1,)))


def test_a_trainer_alone_needs_no_gpu_for_the_engines_of_its_run() -> None:
    flags = ("--data-parallel-size", "2", "--num-engines", "2")
    assert placed(*flags, gpus=2, plan=plan_trainer) == ((0, 1), ())
    flags = (*flags, "--debug-rollout-only")
    assert placed(*flags, gpus=2, plan=plan_trainer) == ((0, 1), ())
    assert placed(*flags, gpus=2) == ((), ((0,), (1,)))


def test_without_a_gpu_there_is_no_plan() -> None:
    assert plan_run(configured("--num-engines", "9"), 0) is None


def test_too_few_gpus_are_refused_with_what_would_fit() -> None:
    error = refusal("--num-engines", "4", gpus=4)
    assert error.value == 4
    assert "needs 5: 1 for the trainer's ranks and 4 for 4 engine(s)" in error.reason
    assert "--num-engines to 3" in error.fix
    assert "--colocate" in error.fix
    error = refusal("--data-parallel-size", "4", gpus=4)
    assert "--data-parallel-size" in error.fix
    error = refusal("--engine.tp-size", "4", gpus=4)
    assert "--engine.tp-size" in error.fix
    error = refusal("--colocate", "--num-engines", "3", gpus=2)
    assert "the same ones by turns" in error.reason
    assert "--colocate" not in error.fix
    error = refusal("--num-engines", "3", gpus=2, plan=plan_engines)
    assert "--num-engines to 2" in error.fix


def test_refusal_names_the_users_choice_of_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    error = refusal("--num-engines", "2", gpus=2)
    assert "CUDA_VISIBLE_DEVICES=2,3 shows no more" in error.reason


@pytest.mark.parametrize(
    ("cores", "of_a_rank"), [(64, 15), (16, 3), (11, 1), (2, 1)], ids=str
)
def test_ranks_share_the_cores_that_engines_leave(cores: int, of_a_rank: int) -> None:
    flags = ("--advantage", "gae", "--critic.data-parallel-size", "2")
    engines = ("--num-engines", "2", "--engine.tp-size", "2")
    policy = ("--data-parallel-size", "2")
    plan = plan_run(configured(*flags, *engines, *policy), 8)
    assert plan is not None
    assert plan.cores_per_rank(cores) == of_a_rank
    assert cores < 8 or 4 * of_a_rank + 4 <= cores


def test_plan_is_printed_in_one_line() -> None:
    flags = ("--data-parallel-size", "2", "--engine.tp-size", "2")
    plan = plan_run(configured(*flags), 4)
    assert str(plan) == "2 trainer ranks on GPUs 0 to 1, engine-0 on GPUs 2 to 3"


def test_each_engine_starts_on_its_first_gpu_every_time(model: Path) -> None:
    def flags_of_engines(gpus: tuple[tuple[int, ...], ...]) -> list[list[str]]:
        launcher = EngineLauncher(
            EngineConfig(num_engines=2),
            model,
            model,
            sglang={},
            weights=ArenaWeights.model_validate({}),
            record_experts=False,
            external_key="",
            traces_endpoint="http://127.0.0.1:1",  # forks no engine
            log=None,
            shares_gpus=False,
            by_priority=False,
            gpus=gpus,
            parent=None,
        )
        return [launcher._gpu_flags(name) for name in launcher.names]

    assert flags_of_engines(((2, 3), (4, 5))) == [
        ["--base-gpu-id", "2"],
        ["--base-gpu-id", "4"],
    ]
    assert flags_of_engines(()) == [[], []]


def test_buckets_take_the_memory_of_one_on_the_gpu_of_the_trainer(model: Path) -> None:
    config = configured("--weights.transport", "bucket", model=model)
    budget = trainer_memory(config, gpus=2, gpu_bytes=10**10)
    assert budget is not None
    largest_tensor = 2 * budget.size.vocabulary
    assert budget.largest().staging == 2 * budget.size.total + largest_tensor
    large = replace(budget, size=replace(budget.size, total=10**9))
    assert large.largest().staging == GPU_BUCKET_BYTES + 2 * largest_tensor


def test_files_take_no_memory_of_a_gpu(model: Path) -> None:
    config = configured("--weights.transport", "disk", model=model)
    budget = trainer_memory(config, gpus=2, gpu_bytes=10**10)
    assert budget is not None
    assert budget.largest().staging == 0


def test_divided_gpu_leaves_the_cache_what_no_other_part_needs(model: Path) -> None:
    config = configured("--max-new-tokens", "16", model=model)
    budget = trainer_memory(config, gpus=1, gpu_bytes=10**10)
    assert budget is not None
    of_token = kv_bytes(read_hf_config(model), 2)
    rest = 8 * 10**9 - budget.largest().total - 2 * budget.size.total
    parts = DividedGpu.of(config, gpu_bytes=10**10)
    assert parts is not None
    assert parts.cache_tokens == int(rest // of_token)


def test_divided_gpu_bounds_the_engine_and_no_other_setting(model: Path) -> None:
    config = configured(model=model)
    plan = plan_run(config, 1)
    divided = with_divided_memory(config, plan, gpu_bytes=10**10)
    parts = DividedGpu.of(config, gpu_bytes=10**10)
    assert parts is not None
    assert divided.engine.max_total_tokens == parts.cache_tokens
    assert divided.sglang == {"mem_fraction_static": "0.8"}
    assert divided.train == config.train


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [
        (["--colocate"], 1),
        ([], 2),
        (["--engine.max-total-tokens", "9000"], 1),
        (["--sglang-mem-fraction-static", "0.5"], 1),
    ],
)
def test_settings_of_the_user_and_other_plans_divide_nothing(
    model: Path, flags: list[str], gpus: int
) -> None:
    config = configured(*flags, model=model)
    plan = plan_run(config, gpus)
    assert with_divided_memory(config, plan, gpu_bytes=10**10) == config


def test_gpu_too_small_for_both_is_refused_by_part(model: Path) -> None:
    config = configured("--max-new-tokens", "64", model=model)
    plan = plan_run(config, 1)
    with pytest.raises(ConfigError, match="do not fit on it together") as caught:
        with_divided_memory(config, plan, gpu_bytes=7 * 10**8)
    for part in ("optimizer", "for its weights", "for its work", "cache of one reply"):
        assert part in caught.value.reason
    assert "--engine.max-total-tokens" in caught.value.fix


def test_cache_of_a_token_has_keys_and_values_of_all_layers(model: Path) -> None:
    config = read_hf_config(model)
    heads = config.num_key_value_heads * config.head_dim
    assert kv_bytes(config, 2) == config.num_hidden_layers * 2 * 2 * heads
    assert kv_bytes(config, 4) == 2 * kv_bytes(config, 2)
