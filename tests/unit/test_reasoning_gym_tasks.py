"""The adapter on the real package: every dataset by name, its own scorer, disjoint
splits."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from reasoning_gym.factory import DATASETS
from slow_cases import first_quick

from invrl.errors import PluginError
from invrl.interfaces import TaskSource
from invrl.rollout.config import RolloutConfig
from invrl.rollout.tasks.tasks import check_tasks
from invrl.types.tasks import Task
from invrl.user_code import plugins
from rollout_fns import reasoning_gym_tasks as gym

PATH = "rollout_fns.reasoning_gym_tasks"
ROOT = Path(__file__).parents[2]
# `composite` has no default; `boxnet`, ... are judged on a plan and have no answer of
# their own.
NAMES = sorted(set(DATASETS) - {"composite"})
NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


class ScriptedModel:
    base_url = api_key = model = "m"

    def __init__(self, text: str | None, finish_reason: str = "stop") -> None:
        self.text = text
        self.finish_reason = finish_reason
        self.messages = []

    def openai(self):
        async def create(*, model, messages):
            self.messages = messages
            message = SimpleNamespace(content=self.text)
            choice = SimpleNamespace(message=message, finish_reason=self.finish_reason)
            return SimpleNamespace(choices=[choice])

        return SimpleNamespace(
            chat=SimpleNamespace(completions=SimpleNamespace(create=create))
        )


def first(source, split: str = "train", seed: int = 0) -> Task:
    """As a worker gets it: a payload is JSON."""
    task = next(source(split, seed))
    return replace(task, payload=json.loads(json.dumps(task.payload)))


async def reward(task: Task, text: str | None, finish_reason: str = "stop"):
    return await gym.rollout(task, ScriptedModel(text, finish_reason))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", first_quick(NAMES))
async def test_every_dataset_scores_its_own_answer_and_tolerates_nonsense(
    name: str,
) -> None:
    task = first(plugins.load_plugin(f"{PATH}:{name}", "task_source_path", TaskSource))
    assert task.id.startswith(f"{name}/")
    if name not in NO_ANSWER:
        assert (await reward(task, str(task.label))).reward == 1.0
    for nonsense in ("{}", "9**9", "no idea", None):
        assert 0.0 <= (await reward(task, nonsense)).reward <= 1.0  # type: ignore[operator]


async def test_reward_is_the_datasets_own_including_partial_rewards() -> None:
    """spell_backward gives part of the reward for the letters in place; its options
    reach the scorer."""
    source = gym.source("spell_backward", min_word_len=4, max_word_len=4)
    task = first(source)
    answer = str(task.label)
    assert len(answer) == 4
    dataset, _ = DATASETS["spell_backward"]
    scorer = dataset(config=DATASETS["spell_backward"][1]())
    item = {
        "question": task.payload["question"],
        "answer": answer,
        "metadata": {"word": answer[::-1]},
    }
    for text in (answer, answer[:2] + "__", "____"):
        assert (await reward(task, f" {text}\n")).reward == scorer.score_answer(
            text, item
        )
    assert (await reward(task, answer, "length")).reward < 1.0


async def test_text_that_a_scorer_cannot_read_scores_0_and_is_counted() -> None:
    task = first(gym.prime_factorization)
    unread = await reward(task, "two times three")
    read = await reward(task, str(task.label))
    assert unread.reward == 0.0
    assert unread.components == {"unreadable": 1.0}
    assert read.reward == 1.0
    assert read.components == {"unreadable": 0.0}


async def test_worked_example_comes_first_and_is_in_no_split() -> None:
    model = ScriptedModel("")
    task = first(gym.one_digit_sums)
    await gym.rollout(task, model)  # type: ignore[arg-type]
    _, asked, shown, question = (message["content"] for message in model.messages)
    assert (question, asked) == (
        task.payload["question"],
        task.payload["example"]["question"],
    )  # type: ignore[index,call-overload]
    sum_of = asked.rpartition(": ")[2].rstrip("= ")
    assert int(shown) == eval(sum_of)
    for split in ("train", "eval"):
        tasks = list(islice(gym.one_digit_sums(split, 3), 300))
        assert asked not in {task.payload["question"] for task in tasks}


async def test_reasoned_reply_is_scored_by_its_last_tagged_answer() -> None:
    task = first(gym.one_digit_sums)
    for text, expected in [
        (f"2 and 2... <answer>99</answer> no: <answer> {task.label} </answer>", 1.0),
        (f"<answer>{task.label}</answer> or <answer>99</answer>", 0.0),
        (f"It is {task.label}", 0.0),
    ]:
        result = await gym.reasoned_rollout(task, ScriptedModel(text))  # type: ignore[arg-type]
        assert result.reward == expected


@pytest.mark.parametrize(
    "source",
    [gym.one_digit_sums, gym.three_letter_words, gym.DatasetSource("gcd", "{}")],
)
def test_splits_share_no_question_for_any_seeds(source: gym.DatasetSource) -> None:
    def questions(split: str, seed: int) -> list[object]:
        return [task.payload["question"] for task in islice(source(split, seed), 300)]

    train = set(questions("train", 1)) | set(questions("train", 2))
    for seed in range(3):
        held = questions("eval", seed)
        assert len(held) == len(set(held)) >= 30
        assert not train & set(held)


def test_the_same_seed_gives_the_same_tasks_in_another_process() -> None:
    code = f"""
from itertools import islice
from {PATH} import three_letter_words as s
print([(t.id, t.payload, t.label) for split in ("train", "eval") for t in islice(s(split, 5), 20)])
"""
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        ).stdout
        for _ in range(2)
    }
    assert len(runs) == 1
    assert (
        next(gym.three_letter_words("train", 5)).id
        != next(gym.three_letter_words("train", 6)).id
    )


def test_train_split_is_endless_and_eval_split_of_a_small_dataset_ends() -> None:
    many = [
        task.payload["question"]
        for task in islice(gym.three_letter_words("train", 0), 500)
    ]
    assert len(set(many)) > 250
    assert len(list(gym.source("count_bits", min_n=1, max_n=40)("eval", 0))) < 40


@pytest.mark.parametrize(
    ("name", "reason", "fix"),
    [
        ("chain_sums", "has no 'chain_sums'", "did you mean 'chain_sum'"),
        ("sudokus", "has no 'sudokus'", "did you mean 'sudoku'"),
        ("nothing_like_it", "has no 'nothing_like_it'", "define"),
    ],
)
def test_wrong_dataset_name_suggests_the_nearest(
    name: str, reason: str, fix: str
) -> None:
    with pytest.raises(PluginError) as caught:
        plugins.load_plugin(f"{PATH}:{name}", "task_source_path", TaskSource)
    assert reason in caught.value.reason
    assert fix in caught.value.fix


def test_missing_and_unknown_dataset_options_are_refused() -> None:
    with pytest.raises(PluginError, match="at least one dataset"):
        check_tasks(RolloutConfig(task_source_path=f"{PATH}:composite"), seed=0)
    with pytest.raises(TypeError, match="max_terns"):
        gym.source("chain_sum", max_terns=2)
    with pytest.raises(AssertionError):
        gym.source("chain_sum", min_terms=5, max_terms=2)
    with pytest.raises(ValueError, match="'test'"):
        next(gym.source("gcd")("test", 0))


def test_missing_reasoning_gym_package_is_an_error_with_the_install_command() -> None:
    code = f"""
import sys
sys.modules["reasoning_gym"] = None
from invrl.interfaces import TaskSource
from invrl.user_code.plugins import load_plugin
load_plugin("{PATH}:gcd", "task_source_path", TaskSource)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("invrl.errors.PluginError")
    assert "pip install reasoning-gym==0.1.25" in last
