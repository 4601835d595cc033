"""A smolagents ToolCallingAgent: its own prompts and loop, a calculator, `final_answer`.

`python smolagents_agent.py BASE_URL KEY [--stream]` prints one JSON line of what it saw.
"""

import json
import sys

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

QUESTIONS = ["What is 12*13?", "And what is 9*11?"]
RESULTS = []


@tool
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression.

    Args:
        expression: such as 2*3
    """
    left, right = expression.split("*")
    RESULTS.append(str(int(left) * int(right)))
    return RESULTS[-1]


def main() -> None:
    url, key = sys.argv[1:3]
    agent = ToolCallingAgent(
        tools=[calculator],
        model=OpenAIModel(model_id="scripted", api_base=url, api_key=key),
        stream_outputs="--stream" in sys.argv,
        verbosity_level=LogLevel.OFF,
        max_steps=4,
    )
    answers = [str(agent.run(question, reset=number == 0)) for number, question in enumerate(QUESTIONS)]
    print(json.dumps({"answers": answers, "results": RESULTS}))


if __name__ == "__main__":
    main()
