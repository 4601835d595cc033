"""One turn, one sum, the answer as JSON: `{"answer": 27}`. The smallest task on which a small model is
seen to learn arithmetic and not only a format.

The reward is 1.0 for a turn that the model ended by itself, is one JSON object with the key `answer` and
nothing else, and holds the sum as an integer; otherwise 0.0.
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
"""New tokens; an answer needs about eight."""
_EXAMPLE = (12, 13)
_EVAL_SHARE = 5
"""One pair in this many is held out."""


async def rollout(task: Task, endpoint: Endpoint) -> RolloutResult:
    """Runs one problem `{"a": int, "b": int}`; its label is the sum."""
    reply = await endpoint.openai().chat.completions.create(
        model=endpoint.model,
        messages=question(task.payload["a"], task.payload["b"]),
        max_tokens=MAX_TOKENS,
    )
    choice = reply.choices[0]
    text = choice.message.content or ""
    ended = choice.finish_reason == "stop"
    return RolloutResult(reward=float(ended and parse_answer(text) == task.label), output=text)


def question(a: object, b: object) -> list[ChatCompletionMessageParam]:
    """The rule, one worked example (a small model needs it to keep to the format), the sum asked for."""
    x, y = _EXAMPLE
    example = json.dumps({"answer": x + y})
    return [
        {"role": "system", "content": f"Add the two numbers. Reply with JSON only, like {example}."},
        {"role": "user", "content": f"{x} + {y}"},
        {"role": "assistant", "content": example},
        {"role": "user", "content": f"{a} + {b}"},
    ]


def parse_answer(text: str) -> int | None:
    """The integer under `answer`; None for anything but a JSON object of that one key."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    answer = found["answer"] if isinstance(found, dict) and found.keys() == {"answer"} else None
    return answer if isinstance(answer, int) and not isinstance(answer, bool) else None


def held_out(a: int, b: int) -> bool:
    """Whether the pair belongs to the split "eval": a hash of the unordered pair decides."""
    low, high = sorted((a, b))
    return hashlib.sha256(f"{low}+{high}".encode()).digest()[0] % _EVAL_SHARE == 0


def task_source(split: str, seed: int) -> Iterator[Task]:
    """Ordered pairs, in an order of the seed. Split "train": those not held out, shuffled again for each
    pass, without end. Split "eval": the held-out ones, once. The worked example's pair is in neither."""
    if split not in ("train", "eval"):
        raise ValueError(f"split is 'train' or 'eval', not {split!r}")
    draw = random.Random(f"json_addition/{split}/{seed}")
    unordered = [pair for pair in combinations_with_replacement(NUMBERS, 2) if pair != _EXAMPLE]
    chosen = [pair for pair in unordered if held_out(*pair) == (split == "eval")]
    ordered = sorted({order for a, b in chosen for order in ((a, b), (b, a))})
    while True:
        for a, b in draw.sample(ordered, len(ordered)):
            yield Task(id=f"{a}+{b}", payload={"a": a, "b": b}, label=a + b, split=split)
        if split == "eval":
            return
