"""How long a row may be: `max_sample_tokens`, or what the engines take.

A longer one is refused before the trainer: by the gateway while it is sampled
(`test_config.py`, `test_large_prompts.py`), and where saved batches are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from packed_rows import batch_of, sample
from tiny_model import make_tiny_model

from invrl.cli.checks.settings_checks import check_row_length, longest_conversation
from invrl.errors import ConfigError
from invrl.run.incarnations.on_saved_batches import _refuse_long_rows
from invrl.run.settings.config import Config, Source, resolve


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_positions=2048)


def configuration(model: Path | str, **train: int) -> Config:
    return resolve(
        Source(
            name="test",
            tables={
                "model": {"model_path": str(model)},
                "train": train,
            },
        )
    )


def test_longest_conversation_is_that_of_the_engines(model: Path) -> None:
    config = configuration(model, max_tokens_per_micro_batch=100)
    assert longest_conversation(config) == 2048
    assert check_row_length(config).endswith(
        "one of more than 100 is a micro-batch alone"
    )


def test_max_sample_tokens_limits_the_conversation(model: Path) -> None:
    config = configuration(model, max_sample_tokens=600)
    assert longest_conversation(config) == 600
    assert "up to 600 tokens" in check_row_length(config)
    assert "alone" not in check_row_length(config)
    assert longest_conversation(configuration(model, max_sample_tokens=5000)) == 2048


def test_max_new_tokens_must_leave_room_for_the_prompt(model: Path) -> None:
    with pytest.raises(ConfigError) as error:
        check_row_length(configuration(model, max_sample_tokens=200))
    assert error.value.field == "rollout.max_new_tokens"
    assert error.value.fix == "lower --max-new-tokens, or raise --max-sample-tokens"


def test_saved_sample_over_the_limit_is_refused() -> None:
    config = configuration("model", max_sample_tokens=21)
    batch = batch_of([sample(0, 0, 21, 5), sample(0, 1, 3, 1)])
    _refuse_long_rows(batch, config)
    longer = batch_of([sample(0, 0, 3, 1), sample(0, 1, 22, 5)])
    with pytest.raises(ConfigError) as error:
        _refuse_long_rows(longer, config)
    assert error.value.field == "train.max_sample_tokens"
    assert error.value.value == 21
    assert "22 tokens" in error.value.reason
    assert error.value.fix == "set --max-sample-tokens to 22 or more, or leave it out"
    _refuse_long_rows(longer, configuration("model", max_tokens_per_micro_batch=5))


def test_batch_without_samples_is_accepted() -> None:
    _refuse_long_rows(batch_of([]), configuration("model", max_sample_tokens=1))
