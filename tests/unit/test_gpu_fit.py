"""What the memory of GPUs decides where the settings do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from large_models import make_large_model

from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError
from invrl.run.processes.gpu_fit import fitted_to_gpus
from invrl.run.processes.gpu_plan import plan_run
from invrl.run.processes.trainer_memory import trainer_memory, with_divided_memory
from invrl.run.settings.config import Config, resolve
from invrl.run.settings.resolved_config import load_resolved, write_resolved

CARD_24 = 24_000_000_000
CARD_80 = 80_000_000_000
DEFAULT_TOKENS = 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which a GPU of 24 GB holds a trainer or an engine, and one of 80 GB
    both."""
    return make_large_model(tmp_path_factory.mktemp("model") / "0.6B", "0.6B")


def configured(model: Path, *flags: str) -> Config:
    required = ["--model-path", str(model), "--rollout-function-path", "agent:rollout"]
    return resolve(*parse_flags([*required, *flags]))


def fitted(config: Config, *, gpus: int, gpu_bytes: int = CARD_80) -> Config:
    return fitted_to_gpus(config, gpus=gpus, gpu_bytes=gpu_bytes)


def test_nothing_is_decided_without_gpus(model: Path) -> None:
    config = configured(model)
    assert fitted(config, gpus=0, gpu_bytes=0) is config
    assert config.train.micro_batch_tokens == DEFAULT_TOKENS


def test_micro_batches_are_as_large_as_a_gpu_of_the_trainer_allows(
    model: Path,
) -> None:
    config = configured(model)
    large = fitted(config, gpus=2)
    assert large.train.max_tokens_per_micro_batch == 16384
    small = fitted(config, gpus=2, gpu_bytes=CARD_24)
    assert small.train.max_tokens_per_micro_batch == DEFAULT_TOKENS
    budget = trainer_memory(config, gpus=2, gpu_bytes=CARD_24)
    assert budget is not None
    assert budget.largest(8192).total > 0.8 * CARD_24


def test_micro_batches_of_the_user_stay(model: Path) -> None:
    config = configured(model, "--max-tokens-per-micro-batch", "1000")
    assert fitted(config, gpus=2).train.max_tokens_per_micro_batch == 1000


def test_micro_batches_stay_small_where_the_engine_gets_the_rest(model: Path) -> None:
    config = configured(model)
    assert fitted(config, gpus=1) is config


def test_run_that_fits_does_not_take_turns(model: Path) -> None:
    for gpus in (1, 2):
        assert not fitted(configured(model), gpus=gpus).run.colocate


def test_trainer_and_engines_take_turns_on_too_few_gpus(model: Path) -> None:
    config = configured(model, "--num-engines", "2")
    with pytest.raises(ConfigError):
        plan_run(config, 2)
    turns = fitted(config, gpus=2)
    assert turns.run.colocate
    assert str(plan_run(turns, 2)).endswith("by turns")


def test_trainer_and_engine_take_turns_on_a_gpu_that_does_not_hold_both(
    tmp_path: Path,
) -> None:
    model = make_large_model(tmp_path / "4B", "4B")
    config = configured(model, "--optimizer-cpu-offload", "--max-new-tokens", "90000")
    with pytest.raises(ConfigError):
        with_divided_memory(config, plan_run(config, 1), gpu_bytes=CARD_80)
    turns = fitted(config, gpus=1)
    assert turns.run.colocate
    without_turns = turns.run.model_copy(update={"colocate": None})
    assert config.run == without_turns


def test_turns_that_the_user_refused_are_not_taken(model: Path) -> None:
    config = configured(model, "--num-engines", "2", "--no-colocate")
    assert fitted(config, gpus=2) is config
    with pytest.raises(
        ConfigError, match="write --colocate for --no-colocate"
    ) as caught:
        plan_run(config, 2)
    assert "--num-engines to 1" in caught.value.fix
    on_one = configured(model, "--no-colocate")
    card = 26_000_000_000  # holds a trainer or an engine
    assert fitted(on_one, gpus=1, gpu_bytes=card) is on_one
    with pytest.raises(ConfigError, match="write --colocate for --no-colocate"):
        with_divided_memory(on_one, plan_run(on_one, 1), gpu_bytes=card)


def test_refused_turns_are_kept_in_the_run_folder(model: Path, tmp_path: Path) -> None:
    for flags, expected in (((), None), (("--no-colocate",), False)):
        write_resolved(tmp_path / "config", configured(model, *flags))
        assert load_resolved(tmp_path / "config").run.colocate is expected


@pytest.mark.parametrize(
    ("flags", "gpus", "gpu_bytes"),
    [
        (["--num-engines", "2", "--weights.update", "rolling"], 2, CARD_80),
        (["--num-engines", "3"], 2, CARD_80),
        ([], 1, 10_000_000_000),
    ],
    ids=["what excludes turns", "too many engines", "too small for a step"],
)
def test_what_does_not_fit_by_turns_either_is_left_to_the_plan(
    model: Path, flags: list[str], gpus: int, gpu_bytes: int
) -> None:
    config = configured(model, *flags)
    assert fitted(config, gpus=gpus, gpu_bytes=gpu_bytes) is config
