"""Any dataset of the package `reasoning-gym` by name: its tasks, one turn, its own scorer.

    --task-source-path rollout_fns.reasoning_gym_tasks:gcd
    --rollout-function-path rollout_fns.reasoning_gym_tasks:rollout

The attribute after the colon is the dataset's name, with its default difficulty. Options of the dataset
are given in a module of your own, `easy = source("gcd", max_numbers=2, max_value=20)`, and named there:
`--task-source-path my_tasks:easy`. Needs `pip install reasoning-gym==0.1.25`.

Invariant: a question's text decides its split, so no question is in both, whatever the seeds. The same
seed gives the same tasks; of four datasets (isomorphic_strings, polynomial_multiplication, ransom_note,
word_ladder) only under the same PYTHONHASHSEED, since they draw from Python sets.
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
from invrl.types import Task

try:
    from reasoning_gym.factory import DATASETS, create_dataset
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; pip install reasoning-gym==0.1.25") from error

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

EVAL_SHARE = 5
"""One question in this many is held out."""
_CHUNK = 100
"""Items generated under one seed."""
_EVAL_CHUNKS = 100
"""The held-out tasks are those among this many chunks."""
_ANSWER_ONLY = "Answer the question. Reply with the answer only."
_REASONED = "Think step by step, then give the answer, and nothing else, between <answer> and </answer>."
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


async def rollout(task: Task, endpoint: Endpoint) -> RolloutResult:
    """The whole reply is the answer; one worked example of the dataset comes first, where it has one."""
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": _ANSWER_ONLY}]
    example = task.payload["example"]
    if isinstance(example, Mapping):
        messages.append({"role": "user", "content": str(example["question"])})
        messages.append({"role": "assistant", "content": str(example["answer"])})
    messages.append({"role": "user", "content": str(task.payload["question"])})
    return await _scored(task, (await _reply(endpoint, messages)).strip())


async def reasoned_rollout(task: Task, endpoint: Endpoint) -> RolloutResult:
    """For larger models: the reply may think; the last `<answer>` of it counts."""
    question = {"role": "user", "content": f"{task.payload['question']}\n\n{_REASONED}"}
    answers = _TAGGED.findall(await _reply(endpoint, [question]))  # type: ignore[list-item]
    return await _scored(task, answers[-1].strip() if answers else "")


async def _reply(endpoint: Endpoint, messages: list[ChatCompletionMessageParam]) -> str:
    """The model's turn; "" if it was cut off."""
    reply = await endpoint.openai().chat.completions.create(model=endpoint.model, messages=messages)
    choice = reply.choices[0]
    return choice.message.content or "" if choice.finish_reason == "stop" else ""


async def _scored(task: Task, answer: str) -> RolloutResult:
    """Some scorers raise on text that they cannot read: that scores 0 and is counted as `unreadable`. In a
    thread, since a scorer may evaluate what the model wrote."""
    name, options = str(task.payload["dataset"]), str(task.payload["options"])
    item = ast.literal_eval(str(task.payload["item"]))
    scorer = await asyncio.to_thread(_dataset, name, options, 0, 1)
    try:
        reward, unreadable = float(await asyncio.to_thread(scorer.score_answer, answer, item)), 0.0
    except Exception:
        reward, unreadable = 0.0, 1.0
    return RolloutResult(reward=reward, components={"unreadable": unreadable}, output=answer)


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """A TaskSource: one dataset with its options. Make it with `source`."""

    name: str
    options: str
    """A Python literal, as everything here that must come back exactly (JSON has no tuples)."""

    def __call__(self, split: str, seed: int) -> Iterator[Task]:
        """Split "train": questions that are not held out, without end, new ones all the time. Split "eval":
        distinct held-out ones. The worked example's question is in neither. A dataset that has no question
        for a split ends without one."""
        if split not in ("train", "eval"):
            raise ValueError(f"split is 'train' or 'eval', not {split!r}")
        first = _dataset(self.name, self.options, 0, 1)[0]
        example = {key: str(first[key]) for key in ("question", "answer")} if first["answer"] else None
        seen = {first["question"]} if example else set()
        found, chunk = 0, 0
        while chunk < _EVAL_CHUNKS or (split == "train" and found):
            chunk_seed = _digest(f"{split}/{seed}/{chunk}") % 2**31
            items = _dataset(self.name, self.options, chunk_seed, _CHUNK)
            for index in range(_CHUNK):
                item = items[index]
                question = item["question"]
                if question in seen or held_out(question) != (split == "eval"):
                    continue
                if split == "eval":
                    seen.add(question)
                found += 1
                payload = {
                    "dataset": self.name,
                    "options": self.options,
                    "question": question,
                    "example": example,
                    "item": repr(_plain(item)),
                }
                name = f"{self.name}/{chunk_seed}/{index}"
                yield Task(id=name, payload=payload, label=str(item["answer"]), split=split)
            chunk += 1


def source(name: str, /, **options: Any) -> DatasetSource:
    """The dataset `name` as a TaskSource; `options` are the fields of its configuration class. Raises
    ValueError, TypeError or AssertionError for a name or options that it does not have."""
    made = DatasetSource(name, repr(_plain(options)))
    create_dataset(name, **{**options, "seed": 0, "size": 1})
    return made


def held_out(question: str) -> bool:
    """Whether the question belongs to the split "eval"."""
    return _digest(question) % EVAL_SHARE == 0


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


@lru_cache(maxsize=64)
def _dataset(name: str, options: str, seed: int, size: int) -> Any:
    return create_dataset(name, **{**ast.literal_eval(options), "seed": seed, "size": size})


def _plain(value: Any) -> Any:
    """numpy scalars, which some datasets leave in their items, as Python's own."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_plain, value))
    return value


one_digit_sums = source("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
three_letter_words = source("spell_backward", min_word_len=3, max_word_len=3)
"""What the presets in invrl/presets/ use."""


def __getattr__(name: str) -> DatasetSource:
    if name not in DATASETS:
        raise AttributeError(f"reasoning-gym has no dataset {name!r}")
    return DatasetSource(name, "{}")


def __dir__() -> list[str]:
    return [*globals(), *DATASETS]
