"""A two-turn agent with a calculator, written with nothing but the `openai` client.

Turn 1: the model writes `calc(a*b)`; we compute it. Turn 2: it is told the result and answers. The
reward is the largest that applies of 0.1 (a well-formed call), 0.2 (the right call) and 1.0 (the
last integer of turn 2 is the product). A turn counts only if the model ended it by itself; without
a call there is no second turn.
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
    from openai.types.chat import ChatCompletionMessageParam
    from openai.types.chat.chat_completion import Choice

OPERANDS = range(11, 60)
MAX_TOKENS = 14
"""New tokens a turn; a call or an answer needs about ten."""
REWARD_CALL, REWARD_RIGHT_CALL, REWARD_ANSWER = 0.1, 0.2, 1.0
_EXAMPLE = (12, 13)
_EVAL_SHARE = 5
"""One pair in this many is held out."""
_CALL = re.compile(r"calc\((\d{1,6})\*(\d{1,6})\)")
_INTEGER = re.compile(r"\d+")


async def rollout(task: Task, endpoint: Endpoint) -> RolloutResult:
    """Runs one problem `{"a": int, "b": int}`."""
    a, b = operands(task)
    client = endpoint.openai()

    async def ask(messages: list[ChatCompletionMessageParam]) -> Choice:
        reply = await client.chat.completions.create(
            model=endpoint.model, messages=messages, max_tokens=MAX_TOKENS
        )
        return reply.choices[0]

    messages = opening(a, b)
    first = await ask(messages)
    call = parse_call(first.message.content or "") if first.finish_reason == "stop" else None
    if call is None:
        return RolloutResult(reward=0.0, output=first.message.content or "")
    messages.append({"role": "assistant", "content": first.message.content})
    messages.append({"role": "user", "content": f"Result: {call[0] * call[1]}"})
    second = await ask(messages)
    answer = second.message.content or "" if second.finish_reason == "stop" else ""
    return RolloutResult(reward=score(a, b, call, answer), output=answer)


def opening(a: int, b: int) -> list[ChatCompletionMessageParam]:
    """The conversation up to the model's first turn: the rule, one worked example, the question."""
    x, y = _EXAMPLE
    return [
        {
            "role": "system",
            "content": "You have a tool: write calc(a*b) to get a result. Then give the answer.",
        },
        {"role": "user", "content": f"What is {x}*{y}?"},
        {"role": "assistant", "content": f"calc({x}*{y})"},
        {"role": "user", "content": f"Result: {x * y}"},
        {"role": "assistant", "content": f"{x * y}"},
        {"role": "user", "content": f"What is {a}*{b}?"},
    ]


def parse_call(text: str) -> tuple[int, int] | None:
    """The operands of the first well-formed call in `text`; None if there is none."""
    found = _CALL.search(text)
    return (int(found[1]), int(found[2])) if found else None


def score(a: int, b: int, call: tuple[int, int], answer: str) -> float:
    """The largest reward that applies, given a well-formed call and the text of turn 2 ("" if that
    turn did not end by itself). A correct product in the answer counts whatever the call was."""
    integers = _INTEGER.findall(answer)
    if integers and integers[-1] == str(a * b):
        return REWARD_ANSWER
    return REWARD_RIGHT_CALL if call == (a, b) else REWARD_CALL


def operands(task: Task) -> tuple[int, int]:
    a, b = task.payload["a"], task.payload["b"]
    if not (isinstance(a, int) and isinstance(b, int)):
        raise TypeError(f"task {task.id}: a and b must be integers, not {a!r} and {b!r}")
    return a, b


def held_out(a: int, b: int) -> bool:
    """Whether the pair belongs to the split "eval": a hash of the unordered pair decides, so the
    splits are disjoint by construction."""
    low, high = sorted((a, b))
    return hashlib.sha256(f"{low}*{high}".encode()).digest()[0] % _EVAL_SHARE == 0


def task_source(split: str, seed: int) -> Iterator[Task]:
    """Split "train": every ordered pair that is not held out, shuffled again for each pass, without end.
    Split "eval": every held-out pair once, in an order and orientation of the seed. The worked example's
    pair is in neither."""
    if split not in ("train", "eval"):
        raise ValueError(f"split is 'train' or 'eval', not {split!r}")
    draw = random.Random(f"calculator/{split}/{seed}")
    pairs = [pair for pair in combinations_with_replacement(OPERANDS, 2) if pair != _EXAMPLE]
    if split == "eval":
        held = [(a, b) if draw.random() < 0.5 else (b, a) for a, b in pairs if held_out(a, b)]
        yield from _tasks(held, split, draw)
        return
    ordered = sorted({order for a, b in pairs if not held_out(a, b) for order in ((a, b), (b, a))})
    while True:
        yield from _tasks(ordered, split, draw)


def _tasks(pairs: Sequence[tuple[int, int]], split: str, draw: random.Random) -> Iterator[Task]:
    for a, b in draw.sample(pairs, len(pairs)):
        yield Task(id=f"{a}*{b}", payload={"a": a, "b": b}, label=a * b, split=split)
