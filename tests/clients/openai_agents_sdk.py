"""An agent of the OpenAI Agents SDK: its own loop, a calculator, chat completions or
responses.

`python openai_agents_sdk.py BASE_URL KEY [--stream] [--responses] [--forced]` prints
one JSON line of what it saw. `--forced`: the first answer to each question must be a
call; afterwards the SDK leaves it to the model.
"""

import asyncio
import json
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

QUESTIONS = ["What is 12*13?", "And 7*8, and 9*11?", "Thank you 🙂"]
RESULTS = []


@function_tool
def calculator(expression: Literal["12*13", "7*8", "9*11"]) -> str:
    """Evaluates an arithmetic expression."""
    left, right = expression.split("*")
    RESULTS.append(str(int(left) * int(right)))
    return RESULTS[-1]


async def main() -> None:
    url, key = sys.argv[1:3]
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
    kind = (
        OpenAIResponsesModel
        if "--responses" in sys.argv
        else OpenAIChatCompletionsModel
    )
    settings = ModelSettings()
    if "--forced" in sys.argv:
        settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    agent = Agent(
        name="calculating",
        instructions="Use the calculator.",
        tools=[calculator],
        model_settings=settings,
        model=kind(model="scripted", openai_client=client),
    )
    answers = []
    items = []
    events = 0
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        if "--stream" in sys.argv:
            result = Runner.run_streamed(agent, items)
            async for _ in result.stream_events():
                events += 1
        else:
            result = await Runner.run(agent, items)
        answers.append(result.final_output)
        items = result.to_input_list()
    print(json.dumps({"answers": answers, "results": RESULTS, "events": events}))


if __name__ == "__main__":
    asyncio.run(main())
