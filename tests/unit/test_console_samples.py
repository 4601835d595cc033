"""What the console tells of a step's replies: some of them, how many are cut, and how
many are distinct."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from loop_parts import EmptyBatches, Notes
from recorded_run import record_run
from stored_rollouts import finish, taken_batch

from invrl.observe.metrics.step_metrics import reply_metrics, rollout_metrics
from invrl.observe.samples.console_samples import choose_rollouts, show_samples
from invrl.observe.screen.progress import PlainProgress
from invrl.run.loop.loop import Parts, run_loop
from invrl.store.run_store import RunStore
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types.batches import TakenBatch, TrainBatch, TrainSample
from invrl.types.groups import Group
from invrl.types.rollouts import RolloutSummary
from invrl.types.weights import WeightVersion


def row(rollout: str, prompt: list[int], reply: list[int]) -> TrainSample:
    tokens_T = np.array(prompt + reply, np.int32)
    mask_T = np.array([False] * len(prompt) + [True] * len(reply))
    return TrainSample(
        tokens_T=tokens_T,
        loss_mask_T=mask_T,
        rollout_logprobs_T=np.zeros(len(tokens_T), np.float32),
        versions_T=np.where(mask_T, 0, -1).astype(np.int32),
        reward=0.0,
        temperature=1.0,
        group_id="g",
        rollout_id=rollout,
        attempt=0,
        turn_ids=(),
    )


def batch(*rows: TrainSample) -> TrainBatch:
    advantages = tuple(np.zeros(len(sample.tokens_T), np.float32) for sample in rows)
    return TrainBatch(
        batch_id=0, version=WeightVersion(0), samples=rows, advantages=advantages
    )


def distinct(*rows: TrainSample) -> float:
    return reply_metrics(batch(*rows))["distinct_replies"].value()


def test_collapsed_policy_has_one_distinct_reply_over_all_tasks() -> None:
    assert (
        distinct(*(row(f"r{number}", [number, 7], [1, 2]) for number in range(80))) == 1
    )
    assert (
        distinct(*(row(f"r{number}", [9], [1, number]) for number in range(80))) == 80
    )
    assert distinct() == 0


def test_a_rollout_of_several_samples_is_one_reply() -> None:
    """Branches and turns count with their rollout: what it said altogether."""
    rows_of_rollout = (
        row("a", [9], [1]),
        row("a", [9, 1, 3], [2]),
    )
    same = (
        row("b", [8], [1]),
        row("b", [8, 1, 3], [2]),
    )
    other = (
        row("c", [8], [1]),
        row("c", [8, 1, 3], [4]),
    )
    assert distinct(*rows_of_rollout) == distinct(*rows_of_rollout, *same) == 1
    assert distinct(*rows_of_rollout, *same, *other) == 2
    assert distinct(row("a", [9], [1]), row("a", [9], [2])) == 1
    assert (
        distinct(row("a", [9], [1, 2]), row("b", [9], [1]), row("b", [9, 1], [2])) == 2
    )


def test_step_line_shows_shares_of_truncated_and_distinct_replies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = {
        "rollout/reward_mean": 1.0,
        "rollout/truncated_share": 0.975,
        "rollout/distinct_replies": 1.0,
    }
    PlainProgress(3).step(2, values | {"rollout/rollouts": 80.0})
    assert "reward 1, cut 98%, distinct replies 1 of 80" in capsys.readouterr().out


def test_step_records_its_lowest_and_highest_reward() -> None:
    metrics = rollout_metrics(taken_batch(2, 3))
    assert [metrics[f"reward_{name}"].value() for name in ("min", "mean", "max")] == [
        0.0,
        1.0,
        2.0,
    ]


def test_samples_come_from_several_groups_and_change_members_each_step() -> None:
    of_step = [choose_rollouts(taken_batch(), 4, step) for step in range(3)]
    assert [[sample.group_id for sample in chosen] for chosen in of_step] == [
        ["g0", "g1", "g2", "g3"]
    ] * 3
    assert [{sample.index for sample in chosen} for chosen in of_step] == [
        {0},
        {1},
        {2},
    ]
    assert len(choose_rollouts(taken_batch(1, 3), 9, 5)) == 3
    assert choose_rollouts(taken_batch(), 0, 5) == []
    assert choose_rollouts(taken_batch(0), 2, 5) == []


def test_a_sample_is_shown_with_task_reward_prompt_and_reply(tmp_path: Path) -> None:
    run = record_run(tmp_path)
    name = run.add(
        "7*6", ["thinking\n\tof it", "42 \x1b[2J" + "!" * 5_000], 0.5, ending="length"
    )
    stored = RunStore(run.folder.store_path).closed_session(name)
    assert stored is not None
    assert isinstance(stored.outcome, RolloutSummary)
    group = Group(id="g-7*6-1", task_id="7*6", rollouts_G=(stored.outcome,))
    of_step = TakenBatch(batch_id=0, version=WeightVersion(0), groups=(group,))
    (text,) = show_samples(run.folder.store_path, 3, 1, of_step)
    head, asked, reply = text.splitlines()
    assert head == "  sample: task 7*6, reward 0.500, 2 turns, cut"
    assert asked == "    user: What is 7*6?"
    assert reply.startswith("    model: 42 \\x1b[2J!!!")
    assert len(reply) < 250


def test_unreadable_store_does_not_end_the_run_over_its_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.sqlite"
    path.write_text("no database" * 1000)
    with caplog.at_level(logging.ERROR):
        assert show_samples(path, 1, 7, taken_batch()) == []
    assert "the samples of step 7 cannot be shown" in caplog.text


def test_rollout_without_any_text_is_shown_as_empty(tmp_path: Path) -> None:
    store = RunStoreWriter(tmp_path / "run.sqlite")
    for rollout in _rollouts(taken_batch(1, 1)):
        finish(store, rollout)
    (text,) = show_samples(tmp_path / "run.sqlite", 1, 1, taken_batch(1, 1))
    assert text.endswith("    model: (nothing)")


def _rollouts(of: TakenBatch) -> list[RolloutSummary]:
    return [rollout for group in of.groups for rollout in group.rollouts_G]


async def test_loop_prints_samples_after_the_line_of_their_step() -> None:
    lines: list[str] = []

    class Observer(Notes):
        def note(self, text: str) -> None:
            lines.append(text)

        def step(self, step: int, values: object) -> None:
            lines.append(f"step {step}")

    def assemble(step: int, of_step: TakenBatch) -> TrainBatch:
        return batch()

    def show(step: int, of_step: TakenBatch) -> list[str]:
        return [f"sample {number} of step {step}" for number in (1, 2)]

    parts = Parts(
        buffer=EmptyBatches(),
        assemble=assemble,
        observer=Observer(),
        learner=None,
        show_samples=show,
    )
    await run_loop(parts, done=0, num_steps=2)
    assert lines == [
        "step 1",
        "sample 1 of step 1",
        "sample 2 of step 1",
        "step 2",
        "sample 1 of step 2",
        "sample 2 of step 2",
    ]
