"""A LangGraph agent over `langchain-openai`: its own loop, its own memory, a calculator.

`python langgraph_agent.py BASE_URL KEY [--stream] [--responses]` prints one JSON line of what it saw.
"""

import json
import sys
import warnings

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent

QUESTIONS = ["What is 12*13?", "And 7*8, and 9*11?", "Thank you 🙂"]
RESULTS = []


@tool
def calculator(expression: str) -> str:
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
    agent = create_react_agent(
        model, [calculator], prompt="Use the calculator.", checkpointer=InMemorySaver()
    )
    thread = {"configurable": {"thread_id": "1"}}
    answers = []
    for question in QUESTIONS:
        state = agent.invoke({"messages": [("user", question)]}, thread)
        answers.append(state["messages"][-1].text)
    print(json.dumps({"answers": answers, "results": RESULTS, "messages": len(state["messages"])}))


if __name__ == "__main__":
    main()
