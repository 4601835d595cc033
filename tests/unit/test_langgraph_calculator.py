"""The reward of the LangGraph example, and its problems' distance from its worked
examples."""

from __future__ import annotations

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from rollout_fns.calculator import OPERANDS
from rollout_fns.langgraph_agent import EXAMPLES, calculator
from rollout_fns.langgraph_calculator import score


def said(expression: object, result: str, answer: str, finish: str = "stop") -> list:
    call = {
        "name": "calculator",
        "args": {"expression": expression},
        "id": "c",
    }
    end = AIMessage(answer, response_metadata={"finish_reason": finish})
    return [
        HumanMessage("What is 17*23?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage(result, tool_call_id="c"),
        end,
    ]


@pytest.mark.parametrize(
    ("messages", "reward"),
    [
        (said("17*23", "391", "It is 391."), 1.0),
        (said("17 * 23", "391", "17*23 = 391"), 1.0),
        (said("17*23", "391", "391 and then 392"), 0.2),
        (said("17*24", "408", "408"), 0.1),
        (said("17*24", "408", "391"), 1.0),
        (said("17*23", "391", "391", finish="length"), 0.0),
        (said("seventeen", "error", "391"), 0.0),
        (said(None, "error", "391"), 0.0),
        (
            [
                HumanMessage("?"),
                AIMessage("391", response_metadata={"finish_reason": "stop"}),
            ],
            0.0,
        ),
    ],
)
def test_langgraph_example_gives_the_largest_applicable_reward(
    messages: list, reward: float
):
    assert score(17, 23, messages) == reward


def test_calculator_tool_computes_products_and_explains_errors():
    assert calculator.invoke({"expression": "12*13"}) == "156"
    assert calculator.invoke({"expression": "12+13"}).startswith("error")


def test_no_problem_is_one_of_the_worked_examples():
    shown = {
        m.tool_calls[0]["args"]["expression"]
        for m in EXAMPLES
        if isinstance(m, AIMessage) and m.tool_calls
    }
    problems = {f"{a}*{b}" for a in OPERANDS for b in OPERANDS} - {"12*13"}
    assert len(shown) == 3
    assert not shown & problems
