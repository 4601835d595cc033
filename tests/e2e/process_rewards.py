"""The task of `trivial.py` with a process reward for each sampled token, and an
objective that reads only those: the rollout's own reward teaches nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invrl.algorithms.loss_inputs import LossInputs, LossOutputs
from invrl.interfaces import Endpoint, RolloutResult
from invrl.types.tasks import Task
from tests.e2e import trivial

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

tasks = trivial.tasks


async def rollout(task: Task, endpoint: Endpoint) -> RolloutResult:
    """Two turns of one conversation. Reward: the share of the last reply's characters
    whose code point is even, for the metrics. Process reward of a token: the same share
    of its own characters, less a half."""
    client = endpoint.openai()
    prompt = str(task.payload["prompt"])
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": prompt}]
    process_rewards: dict[str, dict[str, list[float]]] = {}
    text = ""
    for _ in range(2):
        reply = await client.chat.completions.create(
            model=endpoint.model, messages=messages, logprobs=True, top_logprobs=0
        )
        [choice] = reply.choices
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        of_tokens = [
            _share_of_even(token.token) - 0.5 for token in choice.logprobs.content
        ]
        process_rewards[reply.id] = {"process_reward": of_tokens}
        text = choice.message.content or ""
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": "again"})
    return RolloutResult(reward=_share_of_even(text), token_numbers=process_rewards)


def _share_of_even(text: str) -> float:
    return sum(ord(character) % 2 == 0 for character in text) / max(1, len(text))


def reinforced(inputs: LossInputs) -> LossOutputs:
    """REINFORCE with the process reward of each token as its return."""
    rewards_N = inputs.columns["process_reward"]
    loss = -(rewards_N * inputs.current_N).sum() / inputs.denominators.tokens
    return LossOutputs(loss=loss, metrics={})
