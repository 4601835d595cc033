"""A LangGraph agent with a calculator, as somebody runs it in production. It knows nothing of invrl.

`python -m rollout_fns.langgraph_agent "What is 17*23?"` with OPENAI_BASE_URL, OPENAI_API_KEY and
OPENAI_MODEL set talks to any OpenAI-compatible endpoint. Needs `pip install langgraph langchain-openai`."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import sys

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import create_react_agent
from pydantic import SecretStr

MOST_STEPS = 7
"""Of the graph: three answers of the model, with the tool between them."""


@tool
def calculator(expression: str) -> str:
    """Computes a product such as 12*13."""
    left, _, right = expression.partition("*")
    try:
        return str(int(left) * int(right))
    except ValueError:
        return "error: write two integers and a * between them"


def _worked(left: int, right: int) -> list[AnyMessage]:
    call = {"name": "calculator", "args": {"expression": f"{left}*{right}"}, "id": f"example-{left}"}
    return [
        HumanMessage(f"What is {left}*{right}?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage(f"{left * right}", tool_call_id=call["id"]),
        AIMessage(f"{left * right}"),
    ]


EXAMPLES: list[AnyMessage] = [
    SystemMessage("Use the calculator, then answer with its result."),
    *(message for left, right in ((12, 13), (62, 14), (71, 35)) for message in _worked(left, right)),
]
"""The prompt: a rule and worked examples, enough for a small model to see the form."""


def make_agent(
    *, base_url: str | None = None, api_key: str | None = None, model: str | None = None
) -> CompiledStateGraph:
    """What is not given comes from the environment, as LangChain reads it."""
    name = model or os.environ.get("OPENAI_MODEL", "gpt-4o-mini")
    chat = ChatOpenAI(model=name, base_url=base_url, api_key=SecretStr(api_key) if api_key else None)
    return create_react_agent(chat, [calculator], prompt=lambda state: [*EXAMPLES, *state["messages"]])


async def answer(agent: CompiledStateGraph, question: str) -> list[AnyMessage]:
    """The conversation: the question, calls, results, and last the answer."""
    options: RunnableConfig = {"recursion_limit": MOST_STEPS}
    return (await agent.ainvoke({"messages": [HumanMessage(question)]}, options))["messages"]


if __name__ == "__main__":
    import asyncio

    for message in asyncio.run(answer(make_agent(), sys.argv[1])):
        message.pretty_print()
