"""A smolagents ToolCallingAgent: its own prompts and loop, a calculator,
`final_answer`.

`python smolagents_agent.py BASE_URL KEY [--stream] [--auto]` prints one JSON line of
what it saw. By itself smolagents forces every call (`tool_choice` "required"); `--auto`
leaves it to the model.
"""

import json
import sys
from typing import Literal

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

QUESTIONS = ["What is 12*13?", "And what is 9*11?"]
RESULTS = []


@tool
def calculator(expression: Literal["12*13", "7*8", "9*11"]) -> str:
    """Evaluates an arithmetic expression.

    Args:
        expression: such as 2*3
    """
    left, right = expression.split("*")
    RESULTS.append(str(int(left) * int(right)))
    return RESULTS[-1]


def main() -> None:
    url, key = sys.argv[1:3]
    choice = {"tool_choice": "auto"} if "--auto" in sys.argv else {}
    agent = ToolCallingAgent(
        tools=[calculator],
        model=OpenAIModel(model_id="scripted", api_base=url, api_key=key, **choice),
        stream_outputs="--stream" in sys.argv,
        verbosity_level=LogLevel.OFF,
        max_steps=4,
    )
    answers = [
        str(agent.run(question, reset=number == 0))
        for number, question in enumerate(QUESTIONS)
    ]
    print()  # streamed output ends without a newline
    print(json.dumps({"answers": answers, "results": RESULTS}))


if __name__ == "__main__":
    main()
