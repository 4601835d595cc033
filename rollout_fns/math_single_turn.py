"""The smallest plug-in: ask, compare, return. For tasks with a `question` field and a label.

--rollout-function-path rollout_fns.math_single_turn:rollout --task-file my_tasks.jsonl
"""

from __future__ import annotations

from invrl.interfaces import Endpoint
from invrl.types import Task


async def rollout(task: Task, endpoint: Endpoint) -> float:
    question = {"role": "user", "content": str(task.payload["question"])}
    reply = await endpoint.openai().chat.completions.create(model=endpoint.model, messages=[question])  # type: ignore[list-item]
    words = (reply.choices[0].message.content or "").replace(".", " ").split()
    return float(bool(words) and words[-1] == str(task.label))
