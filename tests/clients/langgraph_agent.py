"""A LangGraph agent over `langchain-openai`: its own loop, its own memory, a
calculator.

`python langgraph_agent.py BASE_URL KEY [--stream] [--responses] [--forced]` prints one
JSON line. `--forced`: a model chosen anew for each step, which must call after a
question, and must not after a result.
"""

import json
import sys
import warnings
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent

QUESTIONS = ["What is 12*13?", "And 7*8, and 9*11?", "Thank you 🙂"]
RESULTS = []


@tool
def calculator(expression: Literal["12*13", "7*8", "9*11"]) -> str:
    """Evaluates an arithmetic expression."""
    left, right = expression.split("*")
    RESULTS.append(str(int(left) * int(right)))
    return RESULTS[-1]


def main() -> None:
    url, key = sys.argv[1:3]
    warnings.simplefilter("ignore")
    model = ChatOpenAI(
        model="scripted",
        base_url=url,
        api_key=key,
        max_retries=0,
        streaming="--stream" in sys.argv,
        use_responses_api="--responses" in sys.argv,
    )

    def forced(state, _):
        choice = "required" if state["messages"][-1].type == "human" else "none"
        return model.bind_tools(
            [calculator], tool_choice=choice, parallel_tool_calls=False
        )

    agent = create_react_agent(
        forced if "--forced" in sys.argv else model,
        [calculator],
        prompt="Use the calculator.",
        checkpointer=InMemorySaver(),
    )
    thread = {"configurable": {"thread_id": "1"}}
    answers = []
    for question in QUESTIONS:
        state = agent.invoke({"messages": [("user", question)]}, thread)
        answers.append(state["messages"][-1].text)
    print(
        json.dumps(
            {"answers": answers, "results": RESULTS, "messages": len(state["messages"])}
        )
    )


if __name__ == "__main__":
    main()
