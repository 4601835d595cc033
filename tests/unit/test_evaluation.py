"""Evaluation: which rollouts it runs and counts, and its statistics against known
values."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace
from fractions import Fraction

import handmade_rollouts
import msgspec
import numpy as np
import pytest
from checks_by_name import run_check
from hypothesis import given
from hypothesis import strategies as st

from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError, PluginError
from invrl.rollout.config import EvalConfig, RolloutConfig
from invrl.rollout.dispatch.evaluation import (
    EvalScore,
    Evaluation,
    evaluate,
    gain_interval,
    pass_at_k,
    wilson_interval,
)
from invrl.rollout.dispatch.intervals import bootstrap_interval
from invrl.rollout.tasks.tasks import held_out_only, load_eval_sets
from invrl.run.settings.config import resolve
from invrl.run.settings.resolved_config import load_resolved
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, RolloutSummary
from invrl.types.sessions import Sampling, Session
from invrl.types.tasks import Task


def summary(session: Session, reward: float) -> RolloutSummary:
    of_session = handmade_rollouts.summary(
        session.id, session.group_id, session.index, reward
    )
    return replace(of_session, task_id=session.task_id, attempt=session.attempt)


class Stage:
    """Sessions and pool in one: `ends(task_id, index, attempt)` says how a rollout
    ends."""

    def __init__(self, ends):
        self.ends = ends
        self.opened = []
        self.running = self.most = 0

    async def open(self, lease, *, purpose="train", sampling=None, deadline_s=None):
        sessions = [
            Session(
                id=f"{lease.group_id}/{m.index}/{m.attempt}",
                key="k",
                base_url="http://gw/s/k/v1",
                task_id=lease.task.id,
                group_id=lease.group_id,
                index=m.index,
                attempt=m.attempt,
                purpose=purpose,
                sampling=sampling or Sampling(),
            )
            for m in lease.members
        ]
        self.opened.extend(sessions)
        return sessions

    async def abort(self, session, reason, detail):
        raise AssertionError("nothing to abort here")

    async def run(self, assignment):
        self.running += len(assignment.sessions)
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= len(assignment.sessions)
        outcomes = []
        for s in assignment.sessions:
            end = self.ends(s.task_id, s.index, s.attempt)
            if isinstance(end, Exception):
                raise end
            outcomes.append(
                FailedRollout(
                    session_id=s.id,
                    task_id=s.task_id,
                    group_id=s.group_id,
                    index=s.index,
                    attempt=s.attempt,
                    reason=end,
                    detail="",
                )
                if isinstance(end, FailureReason)
                else summary(s, end)
            )
        return tuple(outcomes)


TASKS = [Task(id=f"t{i}", payload={}, split="eval") for i in range(6)]


async def run(
    stage, mode="sampled", samples=1, tasks=TASKS, concurrency=4, group_form=False
):
    return await evaluate(
        tasks,
        RolloutConfig(
            eval=EvalConfig(samples_per_task=samples),
            max_new_tokens=14,
            rollout_concurrency=concurrency,
        ),
        mode=mode,
        sessions=stage,
        pool=stage,
        group_form=group_form,
        label="1",
    )


async def test_each_task_is_sampled_the_set_number_of_times():
    stage = Stage(lambda task, index, attempt: 1.0 if index == 0 else 0.2)
    score = await run(stage, samples=2)
    assert score.task_ids == tuple(task.id for task in TASKS)
    assert score.rewards == ((1.0, 0.2),) * 6
    assert score.samples == 12
    assert score.mean_reward == pytest.approx(0.6)
    assert score.accuracy.value == 0.5
    assert {s.purpose for s in stage.opened} == {"eval"}
    assert {s.sampling for s in stage.opened} == {
        Sampling(temperature=1.0, max_new_tokens=14)
    }
    assert stage.most <= 4


async def test_greedy_is_one_sample_at_temperature_zero():
    stage = Stage(lambda *_: 1.0)
    score = await run(stage, mode="greedy", samples=4)
    assert score.samples == 6
    assert {s.sampling.temperature for s in stage.opened} == {0.0}


async def test_a_failed_rollout_scores_zero_and_is_counted():
    stage = Stage(lambda task, *_: FailureReason.EXCEPTION if task == "t3" else 1.0)
    score = await run(stage)
    assert score.rewards[3] == (0.0,)
    assert score.failures == {"exception": 1}
    assert score.accuracy.value == pytest.approx(5 / 6)
    assert score.values()["eval/sampled/failed"] == 1.0
    assert len(stage.opened) == 6


async def test_score_has_the_oldest_and_the_newest_version_that_answered():
    stage = Stage(lambda *_: 1.0)
    versions = iter([(3, 3), (3, 4), (4, 6), (5, 5), (4, 4), (2, 3)])
    run_one = stage.run

    async def answered(assignment):
        [outcome] = await run_one(assignment)
        oldest, newest = next(versions)
        outcome = replace(outcome, oldest_version=oldest, newest_version=newest)
        if oldest > 2:
            return [outcome]
        return [
            FailedRollout(
                session_id=outcome.session_id,
                task_id=outcome.task_id,
                group_id=outcome.group_id,
                index=0,
                attempt=0,
                reason=FailureReason.TIMEOUT,
                detail="",
                partial=outcome,
            )
        ]

    stage.run = answered
    score = await run(stage)
    assert (score.oldest_version, score.newest_version) == (2, 6)
    assert score.values()["eval/sampled/oldest_version"] == 2.0
    assert score.values()["eval/sampled/newest_version"] == 6.0


async def test_score_without_a_token_has_no_version():
    score = await run(Stage(lambda *_: FailureReason.EXCEPTION))
    assert score.oldest_version is None
    assert not any("version" in name for name in score.values())


async def test_rollout_that_failed_by_our_fault_is_retried_in_its_place():
    def ends(task, index, attempt):
        if (task, index) == ("t1", 1) and attempt < 2:
            return FailureReason.WORKER_DIED
        return 1.0 if index else 0.5

    stage = Stage(ends)
    score = await run(stage, samples=2)
    assert score.rewards == ((0.5, 1.0),) * 6
    assert score.failures == {}
    assert len(stage.opened) == 14


async def test_evaluation_gives_up_after_its_retries():
    score = await run(Stage(lambda *_: FailureReason.ENGINE))
    assert score.failures == {"engine": 6}


async def test_a_group_form_gets_the_samples_of_a_task_together():
    stage = Stage(lambda *_: 1.0)
    sizes = []
    run_one = stage.run

    async def recorded(assignment):
        sizes.append(len(assignment.sessions))
        return await run_one(assignment)

    stage.run = recorded
    await run(stage, samples=3, group_form=True)
    assert sizes == [3] * 6


async def test_internal_error_of_an_evaluation_keeps_its_type():
    with pytest.raises(ConnectionError):
        await run(Stage(lambda *_: ConnectionError("gone")))


# ----------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # As scipy.stats.binomtest(...).proportion_ci(method="wilson") gives them.
    [
        (25, 100, 0.1754521, 0.3430446),
        (0, 20, 0.0, 0.1611252),
        (20, 20, 0.8388748, 1.0),
    ],
)
def test_wilson_interval_equals_known_values(successes, n, low, high):
    interval = wilson_interval(successes, n)
    assert interval.value == successes / n
    assert interval.low == pytest.approx(low, abs=1e-6)
    assert interval.high == pytest.approx(high, abs=1e-6)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_its_value_and_mirrors(pair):
    successes, n = pair
    interval = wilson_interval(successes, n)
    mirrored = wilson_interval(n - successes, n)
    assert 0.0 <= interval.low <= interval.value + 1e-12
    assert interval.value - 1e-12 <= interval.high <= 1.0
    assert mirrored.low == pytest.approx(1 - interval.high, abs=1e-9)


def score(*rewards, mode="sampled"):
    return EvalScore(
        mode=mode,
        task_ids=tuple(str(i) for i in range(len(rewards))),
        rewards=tuple((reward,) for reward in rewards),
        failures={},
    )


def test_gain_counts_exact_answers_only():
    gain = gain_interval(score(0.2, 0.2, 1.0, 1.0), score(0.9, 1.0, 1.0, 1.0))
    assert gain.value == 0.25


def test_gain_agrees_with_the_normal_interval_of_paired_differences():
    draw = np.random.default_rng(0)
    before = draw.random(200) < 0.3
    after = draw.random(200) < 0.6
    gain = gain_interval(score(*before.astype(float)), score(*after.astype(float)))
    differences = after.astype(float) - before
    half = 1.96 * differences.std(ddof=1) / np.sqrt(200)
    assert gain.value == pytest.approx(differences.mean())
    assert gain.low == pytest.approx(differences.mean() - half, abs=0.012)
    assert gain.high == pytest.approx(differences.mean() + half, abs=0.012)


def test_gain_without_tasks_is_empty_and_its_interval_depends_only_on_the_seed():
    same = score(1.0, 0.0, 1.0)
    assert gain_interval(same, same).low == 0.0
    assert gain_interval(same, same).high == 0.0
    before, after = score(*[0.0] * 30), score(*[1.0, 0.0] * 15)
    assert gain_interval(before, after, seed=1) == gain_interval(before, after, seed=1)


def test_gain_needs_the_same_tasks_and_mode():
    with pytest.raises(ValueError, match="same tasks"):
        gain_interval(score(1.0), score(1.0, 1.0))
    with pytest.raises(ValueError, match="same mode"):
        gain_interval(score(1.0), score(1.0, mode="greedy"))
    with pytest.raises(ValueError, match="no tasks"):
        gain_interval(score(), score())


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_draws_with_an_exact_answer(n):
    for exact, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([1] * exact + [0] * (n - exact), k))
        share = Fraction(sum(map(max, draws)), len(draws))
        assert pass_at_k(n, exact, k) == pytest.approx(float(share), abs=1e-15)


def test_pass_at_k_of_many_samples_does_not_overflow():
    # No exact one in 500 draws out of 1000 that hold 10: the product of (500 - i) /
    # (1000 - i).
    missed = np.prod([(500 - i) / (1000 - i) for i in range(10)])
    assert pass_at_k(1000, 10, 500) == pytest.approx(1 - missed, rel=1e-12)
    assert pass_at_k(1000, 0, 1) == 0.0
    assert pass_at_k(1000, 501, 500) == 1.0


def test_score_has_pass_at_k_for_each_power_of_two():
    of = EvalScore(
        mode="sampled",
        task_ids=("a", "b"),
        rewards=((1.0, 0.0, 0.2), (0.0, 0.0, 0.0)),
        failures={},
    )
    passed = of.pass_at_k
    assert list(passed) == [1, 2]
    assert passed[1].value == pytest.approx(1 / 6) == of.accuracy.value
    assert passed[2].value == pytest.approx((2 / 3) / 2)
    assert passed[2].low == 0.0
    assert passed[2].high == pytest.approx(2 / 3)
    values = of.values()
    assert values["eval/sampled/pass_at_2"] == passed[2].value
    assert values["eval/sampled/pass_at_2_high"] == passed[2].high
    assert (
        values["eval/sampled/reward_mean"] == pytest.approx(1.2 / 6) == of.mean_reward
    )
    assert values["eval/sampled/reward_mean_low"] == 0.0


@pytest.mark.parametrize("distinct", [3, 400])
def test_the_bootstrap_agrees_with_resampling_tasks_one_by_one(distinct):
    draw = np.random.default_rng(1)
    of_tasks_K = draw.random(distinct)[draw.integers(0, distinct, 400)]
    interval = bootstrap_interval(of_tasks_K)
    means = of_tasks_K[draw.integers(0, 400, (10_000, 400))].mean(axis=1)
    assert interval.value == pytest.approx(of_tasks_K.mean(), abs=1e-15)
    # The Monte Carlo error of a 2.5 % quantile out of 10,000 is about 0.03 standard
    # deviations.
    near = 0.2 * means.std()
    assert interval.low == pytest.approx(np.quantile(means, 0.025), abs=near)
    assert interval.high == pytest.approx(np.quantile(means, 0.975), abs=near)


def test_evaluation_is_read_back_from_json_unchanged():
    once = EvalScore(
        set_name="hard",
        mode="sampled",
        task_ids=("a", "\u00fc@1"),
        rewards=((0.1 + 0.2, 1.0), (-1e-300, 1e9)),
        failures={"timeout": 2},
    )
    evaluation = Evaluation(
        scores={
            "hard/sampled": once,
            "greedy": score(1.0, mode="greedy"),
        }
    )
    again = msgspec.json.decode(msgspec.json.encode(evaluation), type=Evaluation)
    assert again == evaluation
    assert again.values() == evaluation.values()
    assert (
        gain_interval(evaluation.scores["greedy"], again.scores["greedy"]).value == 0.0
    )


def test_scores_of_several_sets_have_different_names():
    scores = [
        EvalScore(
            set_name=s, mode="greedy", task_ids=("a",), rewards=((1.0,),), failures={}
        )
        for s in "ab"
    ]
    values = Evaluation(scores={s.name: s for s in scores}).values()
    assert values["eval/a/greedy/accuracy"] == values["eval/b/greedy/accuracy"] == 1.0
    with pytest.raises(ValueError, match="same mode"):
        gain_interval(*scores)


# ----------------------------------------------------------------- sets


@pytest.fixture
def file(tmp_path):
    def write(n, name="held.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"id": f"q{i}"}) + "\n" for i in range(n)))
        return str(path)

    return write


def test_evaluation_sets_come_from_files_and_sources(file, tmp_path):
    sets = (f"small={file(3)}", "calc-2=rollout_fns.calculator:task_source")
    config = RolloutConfig(
        task_source_path="rollout_fns.calculator:task_source",
        eval=EvalConfig(sets=sets, tasks=2),
    )
    loaded = load_eval_sets(config, 0)
    assert list(loaded) == ["small", "calc-2"]
    assert [task.id for task in loaded["small"]] == ["q0", "q1"]
    assert [task.split for task in loaded["calc-2"]] == ["eval", "eval"]
    whole = RolloutConfig(eval=EvalConfig(sets=sets))
    assert len(load_eval_sets(whole, 0)["small"]) == 3
    unnamed_source = config.model_copy(update={"eval": EvalConfig(tasks=2)})
    unnamed = load_eval_sets(unnamed_source, 0)
    assert unnamed == {"": loaded["calc-2"]}


def test_evaluation_sets_are_read_from_flag_and_toml_and_kept_in_the_run_folder(
    tmp_path,
):
    flags = ["--eval.sets", "a=x.jsonl, b=m:f", "--eval.modes", "greedy"]
    config = resolve(*parse_flags(flags))
    assert config.rollout.eval.sets == ("a=x.jsonl", "b=m:f")
    path = tmp_path / "c.toml"
    path.write_text(config.to_toml())
    assert load_resolved(path) == config
    assert (
        resolve(*parse_flags(["--config", str(path), "--eval.sets="])).rollout.eval.sets
        == ()
    )


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        (["{three}"], "not NAME=WHERE"),
        (["a="], "not NAME=WHERE"),
        (["a b={three}"], "not NAME=WHERE"),
        (["a/b={three}"], "not NAME=WHERE"),
        (
            ["a={three}", "a=rollout_fns.calculator:task_source"],
            "another set is called 'a'",
        ),
        (["a={none}"], "has no tasks"),
        (["a={three}.gone"], "cannot be read"),
        (["a={two}"], "has 2 tasks"),
    ],
)
def test_unusable_evaluation_set_is_refused_before_the_run(sets, reason, file):
    places = {
        "three": file(3),
        "none": file(0, "none.jsonl"),
        "two": file(2, "two.jsonl"),
    }
    named = ",".join(entry.format(**places) for entry in sets)
    config = resolve(
        *parse_flags(
            [
                "--eval.sets",
                named,
                "--eval.tasks",
                "3",
                "--task-source-path",
                "rollout_fns.calculator:task_source",
            ]
        )
    )
    for check in (
        lambda: run_check("held-out sets", config),
        lambda: load_eval_sets(config.rollout, config.run.seed),
    ):
        with pytest.raises(ConfigError) as raised:
            check()
        assert raised.value.field == "eval.sets"
        assert raised.value.value == named.split(",")[-1]
        assert reason in raised.value.reason


def test_evaluation_source_that_does_not_import_is_a_plugin_error_of_its_set():
    with pytest.raises(
        PluginError, match=r"eval\.sets = 'a=rollout_fns\.calculator:gone'"
    ):
        load_eval_sets(
            RolloutConfig(eval=EvalConfig(sets=("a=rollout_fns.calculator:gone",))), 0
        )


def test_evaluation_sets_without_an_evaluation_are_refused_only_in_training(file):
    flags = [
        "--eval.sets",
        f"a={file(3)}",
        "--task-source-path",
        "rollout_fns.calculator:task_source",
    ]
    config = resolve(*parse_flags(flags))
    load_eval_sets(config.rollout, config.run.seed)
    with pytest.raises(ConfigError, match=r"eval\.tasks is not set"):
        run_check("held-out sets", config)


def test_eval_command_uses_the_task_file_and_refuses_two_task_settings():
    assert held_out_only(RolloutConfig(task_file="a.jsonl")) == RolloutConfig(
        eval=EvalConfig(task_file="a.jsonl")
    )
    both = RolloutConfig(task_file="a.jsonl", eval=EvalConfig(task_file="b.jsonl"))
    assert held_out_only(both) == RolloutConfig(eval=EvalConfig(task_file="b.jsonl"))
    named = RolloutConfig(
        task_file="a.jsonl", task_source_path="m:f", eval=EvalConfig(sets=("a=m:f",))
    )
    assert held_out_only(named) == named
    with pytest.raises(ConfigError, match="there are no tasks"):
        held_out_only(RolloutConfig())
    with pytest.raises(ConfigError, match="both"):
        held_out_only(RolloutConfig(task_file="a.jsonl", task_source_path="m:f"))
