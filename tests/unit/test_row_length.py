"""Rows that do not fit a micro-batch are refused before the trainer: by the gateway while they are sampled
(`test_config.py`, `test_large_prompts.py`), and where saved batches are read."""

from __future__ import annotations

import pytest
from test_packing import batch_of, sample

from invrl.errors import ConfigError
from invrl.run.config import Source, resolve
from invrl.run.train_on_saved_batches import _refuse_long_rows


def test_a_saved_row_is_as_long_as_a_micro_batch_at_most() -> None:
    """The last token of a row is only predicted, so a row may have one token more than a micro-batch."""
    config = resolve(Source(name="test", tables={"train": {"max_tokens_per_microbatch": 20}}))
    batch = batch_of([sample(0, 0, 21, 5), sample(0, 1, 3, 1)])
    _refuse_long_rows(batch, config)
    with pytest.raises(ConfigError) as error:
        _refuse_long_rows(batch_of([sample(0, 0, 3, 1), sample(0, 1, 22, 5)]), config)
    assert error.value.field == "train.max_tokens_per_microbatch"
    assert error.value.value == 20
    assert "22 tokens" in error.value.reason
    assert error.value.fix == "set --max-tokens-per-microbatch to 21 or more"


def test_a_batch_without_rows_is_not_refused() -> None:
    _refuse_long_rows(batch_of([]), resolve())
