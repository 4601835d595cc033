"""An agent whose reward random weights can learn: the share of vowels in the reply."""

from invrl.interfaces import Endpoint
from invrl.types import Task


async def rollout(task: Task, endpoint: Endpoint) -> float:
    question = str(task.payload["question"])
    reply = await endpoint.openai().chat.completions.create(
        model=endpoint.model, messages=[{"role": "user", "content": question}]
    )
    text = reply.choices[0].message.content or ""
    num_vowels = sum(letter in "aeiouAEIOU" for letter in text)
    return num_vowels / max(1, len(text))
