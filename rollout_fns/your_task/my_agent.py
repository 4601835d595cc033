"""One question, one answer: right only if the answer is all that the model says."""

from typing import Any

from invrl.interfaces import Endpoint, RolloutResult
from invrl.types import Task

# A small model keeps to a form that it has seen: one example with a word, one with a
# number.
EXAMPLES: list[Any] = [
    {"role": "system", "content": "Answer with one word or one number, nothing else."},
    {"role": "user", "content": "What is the capital of Sweden?"},
    {"role": "assistant", "content": "Stockholm"},
    {"role": "user", "content": "How many wheels does a car have?"},
    {"role": "assistant", "content": "4"},
]


async def rollout(task: Task, endpoint: Endpoint) -> RolloutResult:
    reply = await endpoint.openai().chat.completions.create(
        model=endpoint.model,
        messages=[
            *EXAMPLES,
            {"role": "user", "content": str(task.payload["question"])},
        ],
    )
    choice = reply.choices[0]
    answer = (choice.message.content or "").strip()
    return RolloutResult(
        reward=score(answer, task.label, choice.finish_reason), output=answer
    )


def score(answer: str, label: object, finish_reason: str) -> float:
    """1 if the reply is the label and nothing else, and the model ended it by
    itself."""
    if finish_reason != "stop":
        return 0.0
    return float(answer.removesuffix(".").lower() == str(label).lower())
