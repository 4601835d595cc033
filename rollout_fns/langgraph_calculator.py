"""Trains the LangGraph agent of `langgraph_agent.py`, which does not know it: it gets another base URL.

The reward is the largest that applies of 0.1 (a call whose expression is a product), 0.2 (the right
product) and 1.0 (the last integer of the answer is the product). Problems are the calculator's. Needs a chat
template with tools; `invrl/presets/langgraph_calculator.toml` has one for ChatML models."""

# pyright: reportMissingImports=false
from __future__ import annotations

import re
from collections.abc import Sequence

from langchain_core.messages import AIMessage, AnyMessage
from langgraph.errors import GraphRecursionError

from invrl.interfaces import Endpoint, RolloutResult
from invrl.types import Task
from rollout_fns.calculator import REWARD_ANSWER, REWARD_CALL, REWARD_RIGHT_CALL, operands
from rollout_fns.calculator import task_source as task_source
from rollout_fns.langgraph_agent import answer, make_agent

_PRODUCT = re.compile(r"\s*(\d{1,6})\s*\*\s*(\d{1,6})\s*")
_INTEGER = re.compile(r"\d+")


async def rollout(task: Task, endpoint: Endpoint) -> RolloutResult:
    """Runs one problem `{"a": int, "b": int}`."""
    a, b = operands(task)
    agent = make_agent(base_url=endpoint.base_url, api_key=endpoint.api_key, model=endpoint.model)
    try:
        messages = await answer(agent, f"What is {a}*{b}?")
    except GraphRecursionError:
        return RolloutResult(reward=0.0, output="still calling")
    return RolloutResult(reward=score(a, b, messages), output=str(messages[-1].content))


def score(a: int, b: int, messages: Sequence[AnyMessage]) -> float:
    """Of a conversation that ended by itself; 0 without a well-formed call."""
    said = [message for message in messages if isinstance(message, AIMessage)]
    expressions = [str(call["args"].get("expression")) for each in said for call in each.tool_calls]
    products = [found for text in expressions if (found := _PRODUCT.fullmatch(text))]
    if not products or said[-1].response_metadata.get("finish_reason") != "stop":
        return 0.0
    integers = _INTEGER.findall(str(said[-1].content))
    if integers and integers[-1] == str(a * b):
        return REWARD_ANSWER
    right = any((int(found[1]), int(found[2])) == (a, b) for found in products)
    return REWARD_RIGHT_CALL if right else REWARD_CALL
