"""One turn, one sum, and the answer as JSON: `{"answer": 27}`. The smallest task on
which we have seen a small model learn arithmetic and not only a format.

The reward is 1.0 if the model ended its turn by itself, and the turn is one JSON object
whose only key is `answer` and whose value is the sum as an integer. Otherwise the
reward is 0.0.

Invariant: a pair of numbers, in either order, is in one split only, whatever the seed.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

from invrl.interfaces import Endpoint, RolloutResult
from invrl.types import Task

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

NUMBERS = range(1, 21)
MAX_TOKENS = 14
"""New tokens of the turn. An answer needs about eight."""

_EXAMPLE = (12, 13)
"""The numbers of the worked example."""
_EVAL_SHARE = 5
"""One pair in this many is held out."""


async def rollout(task: Task, endpoint: Endpoint) -> RolloutResult:
    """Runs one problem `{"a": int, "b": int}`. The task's label is the sum."""
    reply = await endpoint.openai().chat.completions.create(
        model=endpoint.model,
        messages=question(task.payload["a"], task.payload["b"]),
        max_tokens=MAX_TOKENS,
    )
    choice = reply.choices[0]
    text = choice.message.content or ""
    is_right = choice.finish_reason == "stop" and parse_answer(text) == task.label
    return RolloutResult(reward=float(is_right), output=text)


def question(a: object, b: object) -> list[ChatCompletionMessageParam]:
    """The rule, one worked example (without it a small model does not keep to the
    format), and the sum."""
    x, y = _EXAMPLE
    example = json.dumps({"answer": x + y})
    return [
        {
            "role": "system",
            "content": f"Add the two numbers. Reply with JSON only, like {example}.",
        },
        {"role": "user", "content": f"{x} + {y}"},
        {"role": "assistant", "content": example},
        {"role": "user", "content": f"{a} + {b}"},
    ]


def parse_answer(text: str) -> int | None:
    """The integer under `answer`. None unless the text is a JSON object with that one
    key."""
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(reply, dict) or reply.keys() != {"answer"}:
        return None
    answer = reply["answer"]
    if not isinstance(answer, int) or isinstance(answer, bool):
        return None
    return answer


def task_source(split: str, seed: int) -> Iterator[Task]:
    """Ordered pairs of numbers, in an order that the seed decides. The pair of the
    worked example is in neither split.

    Split "train": the pairs that are not held out, without end, shuffled again for each
    pass. Split "eval": the held-out pairs once.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split is 'train' or 'eval', not {split!r}")
    rng = random.Random(f"json_addition/{split}/{seed}")
    is_eval = split == "eval"
    ordered_pairs: set[tuple[int, int]] = set()
    for a, b in combinations_with_replacement(NUMBERS, 2):
        if (a, b) != _EXAMPLE and held_out(a, b) == is_eval:
            ordered_pairs.add((a, b))
            ordered_pairs.add((b, a))
    while True:
        for a, b in rng.sample(sorted(ordered_pairs), len(ordered_pairs)):
            yield Task(
                id=f"{a}+{b}", payload={"a": a, "b": b}, label=a + b, split=split
            )
        if is_eval:
            return


def held_out(a: int, b: int) -> bool:
    """Whether the pair belongs to the split "eval". A hash of the pair decides,
    whatever the order of the two numbers."""
    low, high = sorted((a, b))
    digest = hashlib.sha256(f"{low}+{high}".encode()).digest()
    return digest[0] % _EVAL_SHARE == 0
