"""A CrewAI agent with a calculator. `python crewai_agent.py BASE_URL KEY` prints one
JSON line."""

import json
import os
import sys

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "OTEL_SDK_DISABLED": "true",
    "CREWAI_TRACING_ENABLED": "false",
}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

QUESTIONS = ["What is 12*13?", "What are 7*8 and 9*11?"]
RESULTS = []


@tool("calculator")
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    left, right = expression.split("*")
    RESULTS.append(str(int(left) * int(right)))
    return RESULTS[-1]


def main() -> None:
    url, key = sys.argv[1:3]
    model = LLM(model="openai/scripted", base_url=url, api_key=key)
    agent = Agent(
        role="Calculator",
        goal="Calculate",
        backstory="You use the calculator.",
        llm=model,
        tools=[calculator],
    )
    answers = []
    for question in QUESTIONS:
        task = Task(description=question, expected_output="A number", agent=agent)
        answers.append(str(Crew(agents=[agent], tasks=[task]).kickoff()))
    print("\n" + json.dumps({"answers": answers, "results": RESULTS}))


if __name__ == "__main__":
    main()
