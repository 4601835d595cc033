"""A task that any random model can learn in a few steps, and the advantages that must
not teach it.

Reward: the share of the last reply's characters whose code point is even, about a half
for random tokens, so that there is room to rise and to fall.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from invrl.algorithms.advantages.advantages import grpo
from invrl.interfaces import Endpoint
from invrl.types.tasks import Task

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

_LOG = logging.getLogger(__name__)
_WORDS = ("hello", "world", "number", "answer", "question", "fox", "dog", "tool")
_SYSTEM = "the quick brown fox jumps over the lazy dog. hello world, what is the answer to this question?"
_SHUFFLE = np.random.default_rng(0)


def tasks(split: str, seed: int) -> Iterator[Task]:
    """Endless for training, 16 for evaluation."""
    numbers = range(16) if split == "eval" else itertools.count()
    for i in numbers:
        word = _WORDS[(i + seed) % len(_WORDS)]
        yield Task(id=f"{split}-{i}", payload={"prompt": f"say {word}"}, split=split)


async def rollout(task: Task, endpoint: Endpoint) -> float:
    """Two turns of one conversation; the second one's text counts."""
    client, text = endpoint.openai(), ""
    (Path(tempfile.mkdtemp()) / "left by user code").touch()
    _LOG.info(
        "%s begins at %s with the key %s", task.id, endpoint.base_url, endpoint.api_key
    )
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": str(task.payload["prompt"])},
    ]
    for _ in range(2):
        reply = await client.chat.completions.create(
            model=endpoint.model, messages=messages
        )
        text = reply.choices[0].message.content or ""
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "again"},
        ]
    return sum(ord(char) % 2 == 0 for char in text) / max(1, len(text))


def flipped(rewards_G: NDArray[np.float64], *, eps: float) -> NDArray[np.float64]:
    """Negative control: what is rewarded is pushed down."""
    return -grpo(rewards_G, eps=eps)


def shuffled(rewards_G: NDArray[np.float64], *, eps: float) -> NDArray[np.float64]:
    """Negative control: the right rewards, at the wrong rollouts. Of many shuffles the
    one that has least to do with the right order: what luck alone teaches in few steps
    would hide what a fault does."""
    right = grpo(rewards_G, eps=eps)
    return min(
        (_SHUFFLE.permutation(right) for _ in range(64)),
        key=lambda one: abs(float(one @ right)),
    )
