"""A two-turn agent with a calculator, written with nothing but the `openai` client.

In turn 1 the model writes `calc(a*b)`, and we compute the product. In turn 2 it reads
the result and answers. The reward is the largest of these that applies:

    0.1  the first turn has a well-formed call
    0.2  the call has the right operands
    1.0  the last integer of the answer is the product

A turn counts only if the model ended it by itself. Without a call there is no second
turn.

Invariant: a pair of operands, in either order, is in one split only, whatever the seed.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

from invrl.interfaces import Endpoint, RolloutResult
from invrl.types import Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam

OPERANDS = range(11, 60)
MAX_TOKENS = 14
"""New tokens of one turn. A call or an answer needs about ten."""

REWARD_CALL = 0.1
REWARD_RIGHT_CALL = 0.2
REWARD_ANSWER = 1.0

_EXAMPLE = (12, 13)
"""The operands of the worked example."""
_EVAL_SHARE = 5
"""One pair in this many is held out."""
_CALL = re.compile(r"calc\((\d{1,6})\*(\d{1,6})\)")
_INTEGER = re.compile(r"\d+")


async def rollout(task: Task, endpoint: Endpoint) -> RolloutResult:
    """Runs one problem `{"a": int, "b": int}`."""
    a, b = operands(task)
    client = endpoint.openai()
    messages = opening(a, b)

    text, ended = await ask(client, endpoint.model, messages)
    call = parse_call(text)
    if call is None or not ended:
        return RolloutResult(reward=0.0, output=text)

    left, right = call
    messages.append({"role": "assistant", "content": text})
    messages.append({"role": "user", "content": f"Result: {left * right}"})
    answer, ended = await ask(client, endpoint.model, messages)
    if not ended:
        answer = ""
    return RolloutResult(reward=score(a, b, call, answer), output=answer)


async def ask(
    client: AsyncOpenAI, model: str, messages: list[ChatCompletionMessageParam]
) -> tuple[str, bool]:
    """The text of the model's turn, and whether the model ended it by itself."""
    reply = await client.chat.completions.create(
        model=model, messages=messages, max_tokens=MAX_TOKENS
    )
    choice = reply.choices[0]
    return choice.message.content or "", choice.finish_reason == "stop"


def opening(a: int, b: int) -> list[ChatCompletionMessageParam]:
    """The conversation up to the model's first turn: the rule, one worked example, the
    question."""
    x, y = _EXAMPLE
    rule = "You have a tool: write calc(a*b) to get a result. Then give the answer."
    return [
        {"role": "system", "content": rule},
        {"role": "user", "content": f"What is {x}*{y}?"},
        {"role": "assistant", "content": f"calc({x}*{y})"},
        {"role": "user", "content": f"Result: {x * y}"},
        {"role": "assistant", "content": f"{x * y}"},
        {"role": "user", "content": f"What is {a}*{b}?"},
    ]


def parse_call(text: str) -> tuple[int, int] | None:
    """The operands of the first well-formed call in `text`. None if there is no such
    call."""
    match = _CALL.search(text)
    if match is None:
        return None
    return int(match[1]), int(match[2])


def score(a: int, b: int, call: tuple[int, int], answer: str) -> float:
    """The reward of a rollout with a well-formed call. `answer` is the text of turn 2,
    or "" if the model did not end that turn by itself. The right product in the answer
    counts, whatever the call was."""
    integers = _INTEGER.findall(answer)
    if integers and integers[-1] == str(a * b):
        return REWARD_ANSWER
    if call == (a, b):
        return REWARD_RIGHT_CALL
    return REWARD_CALL


def operands(task: Task) -> tuple[int, int]:
    """The two numbers of the task. Raises TypeError if they are not integers."""
    a = task.payload["a"]
    b = task.payload["b"]
    if not isinstance(a, int) or not isinstance(b, int):
        raise TypeError(
            f"task {task.id}: a and b must be integers, not {a!r} and {b!r}"
        )
    return a, b


def task_source(split: str, seed: int) -> Iterator[Task]:
    """The tasks of a split, in an order that the seed decides. The pair of the worked
    example is in neither.

    Split "train": every ordered pair that is not held out, without end, shuffled again
    for each pass. Split "eval": every held-out pair once, in one of its two orders.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split is 'train' or 'eval', not {split!r}")
    rng = random.Random(f"calculator/{split}/{seed}")
    pairs = [
        pair for pair in combinations_with_replacement(OPERANDS, 2) if pair != _EXAMPLE
    ]
    if split == "eval":
        eval_pairs = [_in_random_order(a, b, rng) for a, b in pairs if held_out(a, b)]
        yield from _shuffled_tasks(eval_pairs, split, rng)
        return
    ordered_pairs: set[tuple[int, int]] = set()
    for a, b in pairs:
        if not held_out(a, b):
            ordered_pairs.add((a, b))
            ordered_pairs.add((b, a))
    while True:
        yield from _shuffled_tasks(sorted(ordered_pairs), split, rng)


def held_out(a: int, b: int) -> bool:
    """Whether the pair belongs to the split "eval". A hash of the pair decides,
    whatever the order of the two numbers, so no pair is in both splits."""
    low, high = sorted((a, b))
    digest = hashlib.sha256(f"{low}*{high}".encode()).digest()
    return digest[0] % _EVAL_SHARE == 0


def _in_random_order(a: int, b: int, rng: random.Random) -> tuple[int, int]:
    if rng.random() < 0.5:
        return a, b
    return b, a


def _shuffled_tasks(
    pairs: Sequence[tuple[int, int]], split: str, rng: random.Random
) -> Iterator[Task]:
    for a, b in rng.sample(pairs, len(pairs)):
        yield Task(id=f"{a}*{b}", payload={"a": a, "b": b}, label=a * b, split=split)
