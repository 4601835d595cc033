"""The smallest plug-in: ask, compare, return. It takes tasks with a `question` field
and a label.

--rollout-function-path rollout_fns.math_single_turn:rollout --task-file my_tasks.jsonl
"""

from __future__ import annotations

from invrl.interfaces import Endpoint
from invrl.types import Task


async def rollout(task: Task, endpoint: Endpoint) -> float:
    """1.0 if the last word of the reply is the label."""
    reply = await endpoint.openai().chat.completions.create(
        model=endpoint.model,
        messages=[{"role": "user", "content": str(task.payload["question"])}],
    )
    text = reply.choices[0].message.content or ""
    words = text.replace(".", " ").split()
    return float(words[-1:] == [str(task.label)])
