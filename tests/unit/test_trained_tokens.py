"""What a step did with its tokens: from the rows of a batch to one entry per turn, and
through its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from training_samples_example import row_of_turns

from invrl.errors import RunStoreError
from invrl.interfaces import TokenRecord
from invrl.observe.sinks.token_recorder import TokenRecorder, trained_turns
from invrl.store.trained_tokens import (
    TrainedTurn,
    forget_steps,
    read_trained_tokens,
    recorded_steps,
    tokens_path,
    write_trained_tokens,
)
from invrl.train.batches.sharding import shard_batch
from invrl.train.step.token_records import batch_records
from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.weights import WeightVersion


def batch_of(*samples: TrainSample) -> TrainBatch:
    advantages = []
    for number, sample in enumerate(samples):
        ramp_T = np.arange(len(sample.tokens_T), dtype=np.float32) + 100 * number
        advantages.append(np.where(sample.loss_mask_T, ramp_T, 0).astype(np.float32))
    return TrainBatch(
        batch_id=3,
        version=WeightVersion(2),
        samples=samples,
        advantages=tuple(advantages),
    )


def record_of(batch: TrainBatch, index: int) -> TokenRecord:
    """Log-probs that say which token of the row they are of."""
    mask_T = batch.samples[index].loss_mask_T
    return TokenRecord(
        advantages_N=batch.advantages[index][mask_T],
        logprobs_N=-np.flatnonzero(mask_T).astype(np.float32) / 8,
    )


def test_each_turn_has_the_record_of_its_own_tokens() -> None:
    """Of three turns the second is context here, as one that another row trains; the
    third follows the second without a token between them."""
    row = row_of_turns(("a", 2, 3, True), ("b", 1, 2, False), ("c", 0, 2, True))
    batch = batch_of(row)
    first, last = trained_turns(batch, [record_of(batch, 0)])
    assert first.turn_id == "a"
    assert last.turn_id == "c"
    assert first.trained_N.tolist() == [True, True, True]
    assert first.advantages_N.tolist() == [2, 3, 4]
    assert (first.logprobs_N * -8).tolist() == [2, 3, 4]
    assert last.advantages_N.tolist() == [8, 9]
    assert (last.logprobs_N * -8).tolist() == [8, 9]


def test_a_sampled_token_without_a_logprob_is_not_trained() -> None:
    """The first token of a conversation that begins with what was sampled."""
    row = row_of_turns(("a", 0, 3, True))
    mask_T = row.loss_mask_T.copy()
    mask_T[0] = False
    batch = batch_of(replace(row, loss_mask_T=mask_T))
    [turn] = trained_turns(batch, [record_of(batch, 0)])
    assert turn.trained_N.tolist() == [False, True, True]
    assert np.isnan(turn.logprobs_N).tolist() == [True, False, False]
    assert turn.advantages_N.tolist() == [0, 1, 2]


def test_untrained_samples_and_samples_without_turns_leave_no_record() -> None:
    with_turns = row_of_turns(("a", 1, 2, True))
    batch = batch_of(
        with_turns, replace(row_of_turns(("b", 1, 2, True)), turn_ids=(), turn_spans=())
    )
    assert trained_turns(batch, [None, record_of(batch, 1)]) == []


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 2])
def test_token_records_are_in_the_order_of_the_batch(ranks: int, steps: int) -> None:
    """Although mini-batches and replicas divide the samples by group and by cost."""
    rows = [
        replace(
            row_of_turns((f"turn-{index}", 1, 1 + index % 4, True)),
            group_id=f"group-{index % 3}",
        )
        for index in range(9)
    ]
    batch = batch_of(*rows)
    shards = shard_batch(batch, ranks=ranks, steps=steps)
    records = []
    for shard in shards:
        of_shard: list[TokenRecord | None] = []
        for mini_batch in shard:
            of_shard += [
                record_of(mini_batch, index) for index in range(len(mini_batch.samples))
            ]
        records.append(of_shard)
    for index, record in enumerate(batch_records(batch, shards, records)):
        assert record is not None
        assert (
            record.advantages_N.tolist()
            == record_of(batch, index).advantages_N.tolist()
        )


def test_batch_whose_step_made_no_records_has_none() -> None:
    batch = batch_of(row_of_turns(("a", 1, 2, True)))
    shards = shard_batch(batch, ranks=1, steps=1)
    assert batch_records(batch, shards, [()]) == ()


def some_turns() -> list[TrainedTurn]:
    batch = batch_of(
        row_of_turns(("a", 2, 3, True)),
        row_of_turns(("b/ü", 1, 1, True), ("c", 2, 2, True)),
    )
    return trained_turns(batch, [record_of(batch, 0), record_of(batch, 1)])


def test_token_record_file_is_read_back_unchanged(tmp_path: Path) -> None:
    written = some_turns()
    write_trained_tokens(tmp_path / "trained_tokens", 12, written)
    assert [path.name for path in (tmp_path / "trained_tokens").iterdir()] == [
        "step-00000012.npz"
    ]
    records = read_trained_tokens(tmp_path / "trained_tokens", 12)
    assert list(records) == ["a", "b/ü", "c"]
    for turn in written:
        for name in ("trained_N", "advantages_N", "logprobs_N"):
            np.testing.assert_array_equal(
                getattr(records[turn.turn_id], name), getattr(turn, name)
            )
            assert (
                getattr(records[turn.turn_id], name).dtype == getattr(turn, name).dtype
            )


def test_step_without_turns_or_file_has_no_token_records(tmp_path: Path) -> None:
    write_trained_tokens(tmp_path, 1, [])
    assert read_trained_tokens(tmp_path, 1) == {}
    assert read_trained_tokens(tmp_path, 2) == {}


@pytest.mark.parametrize("kept", [0, 1, 40, 0.5, 0.99])
def test_torn_token_record_file_is_an_error_that_names_the_file(
    kept: float, tmp_path: Path
) -> None:
    write_trained_tokens(tmp_path, 1, some_turns())
    path = tokens_path(tmp_path, 1)
    content = path.read_bytes()
    path.write_bytes(
        content[: int(kept * len(content)) if isinstance(kept, float) else kept]
    )
    with pytest.raises(RunStoreError, match=r"step-00000001\.npz is damaged"):
        read_trained_tokens(tmp_path, 1)


def test_token_record_file_with_wrong_arrays_or_pickles_is_refused(
    tmp_path: Path,
) -> None:
    arrays = {
        "format": np.int64(1),
        "turn_ids": np.array(["a"]),
        "offsets": np.array([0, 5]),
        "trained": np.ones(3, bool),
        "advantages": np.ones(3, np.float32),
        "logprobs": np.ones(3, np.float32),
    }
    np.savez(tokens_path(tmp_path, 1), **arrays)
    np.savez(
        tokens_path(tmp_path, 2),
        **{
            **arrays,
            "turn_ids": np.array([{"a": 1}], object),
        },
    )
    for step in (1, 2):
        with pytest.raises(RunStoreError, match="damaged"):
            read_trained_tokens(tmp_path, step)


def test_token_record_file_of_a_later_version_is_refused(tmp_path: Path) -> None:
    np.savez(tokens_path(tmp_path, 1), format=np.int64(2))
    with pytest.raises(RunStoreError, match="later version"):
        read_trained_tokens(tmp_path, 1)


def test_resumed_run_removes_token_records_of_lost_steps(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        write_trained_tokens(tmp_path, step, some_turns())
    forget_steps(tmp_path, after_step=2)
    assert recorded_steps(tmp_path) == [1, 2]


def test_unwritable_token_record_folder_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "trained_tokens").write_text("in the way")
    recorder = TokenRecorder(tmp_path / "trained_tokens", done=0)
    batch = batch_of(row_of_turns(("a", 2, 3, True)))
    assert "not recorded from now on" in recorder.record(
        1, batch, [record_of(batch, 0)]
    )
    assert recorder.record(2, batch, [record_of(batch, 0)]) == ""
