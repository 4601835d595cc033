"""Any dataset of the package `reasoning-gym` by its name: its tasks, one turn, and its
own scorer.

    --task-source-path rollout_fns.reasoning_gym_tasks:gcd
    --rollout-function-path rollout_fns.reasoning_gym_tasks:rollout

The attribute after the colon is the dataset's name, with its default difficulty. To
choose the options of a dataset, write `easy = source("gcd", max_numbers=2,
max_value=20)` in a module of your own and name that: `--task-source-path
my_tasks:easy`. Needs `pip install reasoning-gym==0.1.25`.

Invariant: the text of a question decides its split, so no question is in both, whatever
the seeds. The same seed gives the same tasks. Four datasets (isomorphic_strings,
polynomial_multiplication, ransom_note, word_ladder) draw from Python sets, so they also
need the same PYTHONHASHSEED.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from invrl.interfaces import Endpoint, RolloutResult
from invrl.types import Json, Task

try:
    from reasoning_gym.factory import DATASETS, create_dataset
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; pip install reasoning-gym==0.1.25") from error

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

EVAL_SHARE = 5
"""One question in this many is held out."""
_CHUNK_SIZE = 100
"""Items that are generated under one seed."""
_MAX_EVAL_CHUNKS = 100
"""The held-out tasks are taken from this many chunks."""
_ANSWER_ONLY = "Answer the question. Reply with the answer only."
_REASON_FIRST = "Think step by step, then give the answer, and nothing else, between <answer> and </answer>."
_TAGGED_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


async def rollout(task: Task, endpoint: Endpoint) -> RolloutResult:
    """The whole reply is the answer. A worked example comes first if the dataset has
    one."""
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": _ANSWER_ONLY}
    ]
    example = task.payload["example"]
    if isinstance(example, Mapping):
        messages.append({"role": "user", "content": str(example["question"])})
        messages.append({"role": "assistant", "content": str(example["answer"])})
    messages.append({"role": "user", "content": str(task.payload["question"])})
    reply = await _ask(endpoint, messages)
    return await _score(task, reply.strip())


async def reasoned_rollout(task: Task, endpoint: Endpoint) -> RolloutResult:
    """For larger models: the reply may think first, and its last `<answer>` is the
    answer."""
    content = f"{task.payload['question']}\n\n{_REASON_FIRST}"
    reply = await _ask(endpoint, [{"role": "user", "content": content}])
    answers = _TAGGED_ANSWER.findall(reply)
    if not answers:
        return await _score(task, "")
    return await _score(task, answers[-1].strip())


async def _ask(endpoint: Endpoint, messages: list[ChatCompletionMessageParam]) -> str:
    """The model's reply. Empty if it was cut off."""
    response = await endpoint.openai().chat.completions.create(
        model=endpoint.model, messages=messages
    )
    choice = response.choices[0]
    if choice.finish_reason != "stop":
        return ""
    return choice.message.content or ""


async def _score(task: Task, answer: str) -> RolloutResult:
    """The reward that the dataset gives to the answer. Some scorers raise for text that
    they cannot read: the reward is then 0, and the component `unreadable` is 1. Scorers
    run in a thread, because some evaluate what the model wrote, which may take long."""
    name = str(task.payload["dataset"])
    options = str(task.payload["options"])
    item = ast.literal_eval(str(task.payload["item"]))
    dataset = await asyncio.to_thread(_dataset, name, options, seed=0, size=1)
    try:
        reward = float(await asyncio.to_thread(dataset.score_answer, answer, item))
        unreadable = 0.0
    except Exception:
        reward = 0.0
        unreadable = 1.0
    return RolloutResult(
        reward=reward, components={"unreadable": unreadable}, output=answer
    )


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """A task source: one dataset with its options. `source` makes one."""

    name: str
    options: str
    """A Python literal. Options and items are literals because JSON has no tuples."""

    def __call__(self, split: str, seed: int) -> Iterator[Task]:
        """Split "train": questions that are not held out, without end, new ones all the
        time. Split "eval": distinct held-out questions. The question of the worked
        example is in neither. If a dataset has no question for a split, the split is
        empty."""
        if split not in ("train", "eval"):
            raise ValueError(f"split is 'train' or 'eval', not {split!r}")
        is_eval = split == "eval"
        example = self._worked_example()
        excluded: set[str] = set()
        if example is not None:
            excluded.add(str(example["question"]))
        num_tasks = 0
        chunk = 0
        while chunk < _MAX_EVAL_CHUNKS or (not is_eval and num_tasks > 0):
            chunk_seed = _digest(f"{split}/{seed}/{chunk}") % 2**31
            items = _dataset(self.name, self.options, seed=chunk_seed, size=_CHUNK_SIZE)
            for index in range(_CHUNK_SIZE):
                item = items[index]
                question = item["question"]
                if question in excluded or held_out(question) != is_eval:
                    continue
                if is_eval:
                    excluded.add(question)
                num_tasks += 1
                payload: dict[str, Json] = {
                    "dataset": self.name,
                    "options": self.options,
                    "question": question,
                    "example": example,
                    "item": repr(_without_numpy(item)),
                }
                task_id = f"{self.name}/{chunk_seed}/{index}"
                yield Task(
                    id=task_id, payload=payload, label=str(item["answer"]), split=split
                )
            chunk += 1

    def _worked_example(self) -> dict[str, Json] | None:
        """The question and the answer of one item. None for a dataset without answers
        of its own."""
        item = _dataset(self.name, self.options, seed=0, size=1)[0]
        if not item["answer"]:
            return None
        return {"question": str(item["question"]), "answer": str(item["answer"])}


def source(name: str, /, **options: Any) -> DatasetSource:
    """The dataset `name` as a task source. `options` are fields of the dataset's
    configuration class. Raises ValueError, TypeError or AssertionError for a name or an
    option that does not exist."""
    # Made once to check the name and the options now.
    create_dataset(name, **{**options, "seed": 0, "size": 1})
    return DatasetSource(name, repr(_without_numpy(options)))


def held_out(question: str) -> bool:
    """Whether the question belongs to the split "eval"."""
    return _digest(question) % EVAL_SHARE == 0


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


@lru_cache(maxsize=64)
def _dataset(name: str, options: str, *, seed: int, size: int) -> Any:
    """The dataset with `size` items, which the seed decides."""
    return create_dataset(
        name, **{**ast.literal_eval(options), "seed": seed, "size": size}
    )


def _without_numpy(value: Any) -> Any:
    """The value with plain numbers in place of numpy's scalars, which some datasets
    leave in their items."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {
            _without_numpy(key): _without_numpy(entry) for key, entry in value.items()
        }
    if type(value) in (list, tuple, set):
        return type(value)(_without_numpy(entry) for entry in value)
    return value


one_digit_sums = source(
    "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1
)
three_letter_words = source("spell_backward", min_word_len=3, max_word_len=3)
"""What the presets in invrl/presets/ use."""


def __getattr__(name: str) -> DatasetSource:
    if name not in DATASETS:
        raise AttributeError(f"reasoning-gym has no dataset {name!r}")
    return DatasetSource(name, "{}")


def __dir__() -> list[str]:
    return [*globals(), *DATASETS]
