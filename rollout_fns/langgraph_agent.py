"""A LangGraph agent with a calculator, as one would run it in production. It knows
nothing of invrl.

`python -m rollout_fns.langgraph_agent "What is 17*23?"` talks to any OpenAI-compatible
endpoint. The environment names it: OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL.
Needs `pip install langgraph langchain-openai`."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import os
import sys

from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import create_react_agent
from pydantic import SecretStr

MAX_STEPS = 7
"""Steps of the graph: three answers of the model, with the tool between them."""


@tool
def calculator(expression: str) -> str:
    """Computes a product such as 12*13."""
    left, _, right = expression.partition("*")
    try:
        return str(int(left) * int(right))
    except ValueError:
        return "error: write two integers and a * between them"


def worked_example(left: int, right: int) -> list[AnyMessage]:
    """A conversation as it should be: a question, a call of the tool, its result, and
    the answer."""
    call = {
        "name": "calculator",
        "args": {"expression": f"{left}*{right}"},
        "id": f"example-{left}",
    }
    return [
        HumanMessage(f"What is {left}*{right}?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage(f"{left * right}", tool_call_id=call["id"]),
        AIMessage(f"{left * right}"),
    ]


EXAMPLES: list[AnyMessage] = [
    SystemMessage("Use the calculator, then answer with its result."),
    *worked_example(12, 13),
    *worked_example(62, 14),
    *worked_example(71, 35),
]
"""The prompt: a rule and worked examples, enough for a small model to see the form."""


def make_agent(
    *, base_url: str | None = None, api_key: str | None = None, model: str | None = None
) -> CompiledStateGraph:
    """An argument that is not given comes from the environment, as LangChain reads
    it."""
    if not model:
        model = os.environ.get("OPENAI_MODEL", "gpt-4o-mini")
    secret = None
    if api_key:
        secret = SecretStr(api_key)
    chat = ChatOpenAI(model=model, base_url=base_url, api_key=secret)
    return create_react_agent(
        chat, [calculator], prompt=lambda state: [*EXAMPLES, *state["messages"]]
    )


async def answer(agent: CompiledStateGraph, question: str) -> list[AnyMessage]:
    """The conversation: the question, the calls and their results, and the answer as
    the last message."""
    options: RunnableConfig = {"recursion_limit": MAX_STEPS}
    state = await agent.ainvoke({"messages": [HumanMessage(question)]}, options)
    return state["messages"]


if __name__ == "__main__":
    for message in asyncio.run(answer(make_agent(), sys.argv[1])):
        message.pretty_print()
