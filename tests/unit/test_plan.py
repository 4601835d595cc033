"""`invrl plan`: its closed forms and its estimates against virtual runs, a recorded run,
and bad input."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recorded_run import RecordedRun, record_run
from virtual_run import Setting, virtual_run

from benchmarks.plan_errors import RUNS, TOLERANCE, planned_step
from invrl.buffer.config import BufferConfig
from invrl.cli.commands.plan import plan
from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError
from invrl.run.plan.config import PlanConfig
from invrl.run.plan.jumping_clock import run_jumping
from invrl.run.plan.plan import (
    Estimate,
    Plan,
    best_split,
    estimate,
    make_plan,
    present_workload,
    with_enough_slots,
)
from invrl.run.plan.recorded_workload import engine_rates, paced_lengths, read_run
from invrl.run.plan.virtual_run import VirtualRun
from invrl.run.plan.workload import LognormalLengths, RecordedLengths, Workload
from invrl.run.settings.config import resolve
from invrl.types.rollouts import RolloutSummary

SETTINGS = [
    Setting(
        groups=8,
        group_size=4,
        sigma=sigma,
        slots_per_rollout=slots,
        training_share=share,
    )
    for sigma, slots, share in [
        (0.5, 1.0, 0.5),
        (1.0, 0.5, 1.0),
        (1.0, 2.0, 2.0),
    ]
]


def seconds_per_step(
    setting: Setting, max_staleness: int, num_steps: int = 60
) -> float:
    """Seconds of a longer run of other lengths."""
    workload = replace(setting, seed=1).workload
    result = virtual_run(
        workload, num_steps=num_steps, max_staleness=max_staleness, admission="ready"
    )
    return result.seconds / num_steps


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("max_staleness", [1, 4])
def test_estimated_step_takes_as_long_as_one_of_another_run(
    setting: Setting, max_staleness: int
) -> None:
    estimated = estimate(setting.workload, max_staleness, "ready")
    expected = seconds_per_step(setting, max_staleness)
    assert estimated.step_s == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("setting", SETTINGS)
def test_closed_forms_are_the_ends_of_what_a_run_can_do(setting: Setting) -> None:
    workload = setting.workload
    synchronous_s = workload.barrier_s + workload.trainer_s
    assert estimate(workload, 0).step_s == pytest.approx(synchronous_s, rel=0.1)
    shortest_s = estimate(workload, 8, "ready").step_s
    assert shortest_s == pytest.approx(workload.best_step_s, rel=0.1)
    assert workload.bound == pytest.approx(synchronous_s / shortest_s, rel=0.1)


def constant_lengths(**changes: float) -> Workload:
    """Two groups of two rollouts of 100 tokens each."""
    workload = Workload(
        lengths=RecordedLengths([[100, 100]]),
        groups=2,
        group_size=2,
        slots=4,
        token_s=0.01,
        request_s=0.001,
        training_s=3.0,
        update_s=0.5,
    )
    return replace(workload, **changes)


def test_bound_of_equal_lengths_is_that_of_the_sums() -> None:
    workload = constant_lengths()
    assert workload.step_s(4) == pytest.approx(0.013)
    assert workload.packed_s == workload.barrier_s == pytest.approx(1.3)
    assert workload.bound == pytest.approx((1.3 + 3.5) / 3.5)


def test_generation_of_a_batch_speeds_up_as_its_rollouts_end() -> None:
    workload = constant_lengths()
    workload = replace(workload, lengths=RecordedLengths([[100, 300]]))
    assert workload.barrier_s == pytest.approx(100 * 0.013 + 200 * 0.011)
    two_slots = replace(workload, slots=2)
    assert two_slots.barrier_s == pytest.approx(300 * 0.011 + 200 * 0.01)


def test_engines_share_the_requests() -> None:
    workload = constant_lengths(num_engines=2)
    assert workload.step_s(4) == pytest.approx(0.011)
    assert workload.step_s(1) == 0.01


def test_lognormal_lengths_have_their_mean_and_repeat() -> None:
    lengths = LognormalLengths(mean=400.0, sigma=0.5, group_size=8)
    drawn = [length for number in range(500) for length in lengths.of_group(number)]
    assert np.mean(drawn) == pytest.approx(400, rel=0.03)
    assert lengths.of_group(7) == lengths.of_group(7)


def config(**values: float) -> PlanConfig:
    rates = {"length_mean": 200.0, "token_s": 0.01, "request_s": 0.0, "training_s": 8.0}
    sizes = {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "length_sigma": 0.3}
    return PlanConfig.model_validate({**rates, **sizes, **values})


def test_gpus_go_to_the_part_that_is_the_bottleneck() -> None:
    workload, trainer_gpus = best_split(config(num_engines=3, trainer_gpus=1))
    assert (workload.num_engines, trainer_gpus) == (1, 3)
    generates_long = config(
        num_engines=1, trainer_gpus=3, training_s=1.0, request_s=0.02
    )
    workload, trainer_gpus = best_split(generates_long)
    assert (workload.num_engines, trainer_gpus) == (3, 1)
    assert workload.training_s == pytest.approx(3.0)


def test_slots_are_as_few_as_keep_up_with_the_trainer() -> None:
    workload = present_workload(config(training_s=1.9, length_sigma=0.0))
    assert with_enough_slots(workload).slots == 20
    assert with_enough_slots(replace(workload, training_s=9.0)).slots == 8
    assert with_enough_slots(replace(workload, training_s=0.1)).slots == 32


def test_least_staleness_that_is_hardly_slower_is_the_best() -> None:
    estimates = [
        Estimate(
            max_staleness=staleness,
            admission="ready",
            step_s=step_s,
            age_mean=0.0,
            age_p99=0.0,
        )
        for staleness, step_s in [(0, 12.0), (1, 10.2), (2, 10.1), (4, 10.0)]
    ]
    workload = constant_lengths()
    planned = Plan(workload=workload, trainer_gpus=1, estimates=estimates)
    assert planned.best.max_staleness == 1


# ----------------------------------------------------------------- a recorded run


def rollout(started_at: float, tokens: int, seconds: float) -> RolloutSummary:
    from handmade_rollouts import summary

    return replace(
        summary(),
        started_at=started_at,
        finished_at=started_at + seconds,
        sampled_tokens=tokens,
    )


def test_rates_of_an_engine_follow_from_overlapping_rollouts() -> None:
    """One rollout alone, two together, four together: a step of 0.01 s, and 0.002 s
    for each further one."""
    rollouts = [rollout(0.0, 100, 1.0)]
    rollouts += [rollout(10.0, 100, 1.2)] * 2
    rollouts += [rollout(20.0, 50, 0.8)] * 4
    assert engine_rates(rollouts, 1) == (pytest.approx(0.01), pytest.approx(0.002))


def test_request_adds_at_most_the_time_of_a_step_alone() -> None:
    """Rollouts that all ran in the same company do not show it."""
    rollouts = [rollout(0.0, 100, 1.6)] * 8
    token_s, request_s = engine_rates(rollouts, 1)
    assert token_s + 7 * request_s == pytest.approx(0.016)
    assert token_s >= request_s


def test_rollout_that_took_longer_than_its_tokens_counts_as_longer() -> None:
    rollouts = [rollout(0.0, 100, 2.0), rollout(0.0, 100, 1.0)]
    rollouts += [rollout(10.0, 50, 0.5)] * 8
    lengths = paced_lengths(rollouts, 1, token_s=0.01, request_s=0.0)
    assert lengths == [pytest.approx(200), pytest.approx(100)] + [pytest.approx(50)] * 8


def test_rollouts_of_a_run_predict_its_steps() -> None:
    """Only their times, tokens and groups are known."""
    workload = SETTINGS[0].workload
    num_steps = 20

    async def recorded_run() -> tuple[float, list[RolloutSummary]]:
        config = BufferConfig(max_staleness=1, group_filter="none")
        run = VirtualRun(workload, config)
        seconds = await run.make_steps(num_steps)
        groups = [group for batch in run.batches for group in batch.groups]
        return seconds, [rollout for group in groups for rollout in group.rollouts_G]

    seconds, rollouts = run_jumping(recorded_run())
    token_s, request_s = engine_rates(rollouts, 1)
    lengths = [rollout.sampled_tokens for rollout in rollouts]
    groups = [lengths[first : first + 4] for first in range(0, len(lengths), 4)]
    read = replace(
        workload,
        lengths=RecordedLengths(groups),
        token_s=token_s,
        request_s=request_s,
    )
    for num_running in (8, 16, 32):
        expected_s = workload.step_s(num_running)
        assert read.step_s(num_running) == pytest.approx(expected_s, rel=0.1)
    assert estimate(read, 1).step_s == pytest.approx(seconds / num_steps, rel=0.1)


@pytest.mark.parametrize(
    "name", ["synchronous_short", "staleness_1_two_engines", "staleness_2_ready"]
)
def test_plan_of_a_real_run_takes_as_long_as_the_run(name: str) -> None:
    planned = planned_step(RUNS / f"{name}.json")
    assert abs(planned.error) < TOLERANCE


def recorded(tmp_path: Path, num_rollouts: int = 16) -> RecordedRun:
    run = record_run(tmp_path)
    for number in range(num_rollouts):
        run.add(f"t{number // 8}", "4", 1.0, index=number % 8, group=f"g{number // 8}")
    run.writer.close()
    run.ledger.close()
    return run


def write_steps(run: RecordedRun, **more: float) -> None:
    rows = [
        {"step": 0, "eval/greedy/accuracy": 0.5},
        *(
            {
                "step": step,
                "time/rollout_s": 4.0,
                "time/train_s": train_s,
                "time/step_s": 4.5 + train_s,
                **more,
            }
            for step, train_s in [(1, 9.0), (2, 3.0), (3, 2.0)]
        ),
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    run.folder.metrics_path.write_text("".join(lines))


def test_plan_reads_lengths_and_rates_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded(tmp_path)
    write_steps(run)
    read, lengths = read_run(run.folder)
    assert lengths.groups == [pytest.approx([9] * 8)] * 2
    assert (read.training_s, read.update_s) == (3.0, 0.5)
    assert read.length_mean == 9
    # sixteen rollouts of 9 tokens together for a second
    assert read.token_s + 15 * read.request_s == pytest.approx(1 / 9)
    plan([str(run.folder.path), "--training-s", "5"])
    text = capsys.readouterr().out
    assert "trainer     5.5 s with the weight update" in text
    assert re.search(r"^give: --max-staleness \d --admission \w+ ", text, re.MULTILINE)


def test_plan_keeps_the_rule_for_old_tokens_of_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded(tmp_path)
    write_steps(run)
    settings = "--max-staleness 2 --when-stale wait".split()
    run.folder.config_path.write_text(resolve(*parse_flags(settings)).to_toml())
    read, lengths = read_run(run.folder)
    assert read.when_stale == "wait"
    modes = [
        (made.max_staleness, made.admission)
        for made in make_plan(read, lengths).estimates
    ]
    assert modes == [(0, "groups"), (1, "groups"), (2, "groups"), (4, "groups")]
    plan([str(run.folder.path), "--training-s", "1"])
    give = capsys.readouterr().out.splitlines()[-1]
    assert ("--when-stale wait" in give) == ("--max-staleness 0" not in give)


def test_no_token_is_too_old_in_a_plan_that_waits() -> None:
    workload = replace(SETTINGS[1], sigma=1.5).workload
    waits = estimate(workload, 1, when_stale="wait")
    assert waits.age_p99 <= 1
    assert estimate(workload, 1).age_p99 > 1


def test_plan_leaves_out_engines_that_are_set_aside_for_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded(tmp_path)
    write_steps(run)
    settings = (
        "--num-engines 4 --eval.engines 1 --eval.tasks 4 --eval.interval 2".split()
    )
    run.folder.config_path.write_text(resolve(*parse_flags(settings)).to_toml())
    read, _ = read_run(run.folder)
    assert (read.num_engines, read.eval_engines) == (3, 1)
    plan(
        "--length-mean 50 --rollout-batch-size 2 --n-samples-per-prompt 4 --token-s 0.01 "
        "--request-s 0.001 --training-s 0.2 --eval-engines 2".split()
    )
    text = capsys.readouterr().out
    assert "1 for engines (1)" in text
    assert text.endswith("--num-engines 3 --eval.engines 2\n")


def test_plan_of_flags_needs_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    plan(
        "--length-mean 50 --rollout-batch-size 2 --n-samples-per-prompt 4 --token-s 0.01 "
        "--request-s 0.001 --training-s 0.2".split()
    )
    lines = capsys.readouterr().out.splitlines()
    [row] = [line for line in lines if line.startswith("0 ")]
    assert row.split()[1] == "groups"
    assert any(line.startswith("bottleneck: the engines") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "field", "reason"),
    [
        (["--length-mean", "0"], "--length-mean", "greater than 0"),
        (["--length-mean", "many"], "--length-mean", "a valid number"),
        (["--length-mean", "9"], "--token-s", "missing"),
        ([], "--length-mean", "missing"),
        (["--lengths", "9"], "command line", "no such flag"),
        (["/nowhere"], "RUN", "not a run folder"),
    ],
)
def test_bad_input_of_a_plan_is_refused(
    arguments: list[str], field: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        plan(arguments)
    assert caught.value.field == field


def test_run_that_cannot_be_planned_from_is_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path, num_rollouts=3)
    with pytest.raises(ConfigError, match="it has made no training step"):
        plan([str(run.folder.path)])
    write_steps(run)
    with pytest.raises(ConfigError, match="3 of its rollouts have sampled tokens"):
        plan([str(run.folder.path)])
    write_steps(run, **{"time/gpu_turn_s": 0.01})
    with pytest.raises(ConfigError, match="took turns on a GPU"):
        plan([str(run.folder.path)])
