"""Trains the LangGraph agent of `langgraph_agent.py` without a change to it: it gets
another base URL.

The problems are those of `calculator.py`. The reward is the largest of these that
applies:

    0.1  a call whose expression is a product
    0.2  a call of the right product
    1.0  the last integer of the answer is the product

Needs a chat template with tools. `invrl/presets/langgraph_calculator.toml` has one for
ChatML models."""

# pyright: reportMissingImports=false
from __future__ import annotations

import re
from collections.abc import Sequence

from langchain_core.messages import AIMessage, AnyMessage
from langgraph.errors import GraphRecursionError

from invrl.interfaces import Endpoint, RolloutResult
from invrl.types import Task
from rollout_fns.calculator import (
    REWARD_ANSWER,
    REWARD_CALL,
    REWARD_RIGHT_CALL,
    operands,
)
from rollout_fns.calculator import task_source as task_source
from rollout_fns.langgraph_agent import answer, make_agent

_PRODUCT = re.compile(r"\s*(\d{1,6})\s*\*\s*(\d{1,6})\s*")
_INTEGER = re.compile(r"\d+")


async def rollout(task: Task, endpoint: Endpoint) -> RolloutResult:
    """Runs one problem `{"a": int, "b": int}`."""
    a, b = operands(task)
    agent = make_agent(
        base_url=endpoint.base_url, api_key=endpoint.api_key, model=endpoint.model
    )
    try:
        messages = await answer(agent, f"What is {a}*{b}?")
    except GraphRecursionError:
        return RolloutResult(reward=0.0, output="still calling")
    return RolloutResult(reward=score(a, b, messages), output=str(messages[-1].content))


def score(a: int, b: int, messages: Sequence[AnyMessage]) -> float:
    """The reward of a conversation. 0 if it has no well-formed call, or if the model
    did not end its last message by itself."""
    replies = [message for message in messages if isinstance(message, AIMessage)]
    products = called_products(replies)
    if not products or replies[-1].response_metadata.get("finish_reason") != "stop":
        return 0.0
    integers = _INTEGER.findall(str(replies[-1].content))
    if integers and integers[-1] == str(a * b):
        return REWARD_ANSWER
    if (a, b) in products:
        return REWARD_RIGHT_CALL
    return REWARD_CALL


def called_products(replies: Sequence[AIMessage]) -> list[tuple[int, int]]:
    """The operands of every call of the calculator whose expression is a product."""
    products: list[tuple[int, int]] = []
    for reply in replies:
        for call in reply.tool_calls:
            match = _PRODUCT.fullmatch(str(call["args"].get("expression")))
            if match is not None:
                products.append((int(match[1]), int(match[2])))
    return products
