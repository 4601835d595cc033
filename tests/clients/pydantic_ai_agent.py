"""An agent of pydantic-ai with a calculator, over chat completions, responses or
Anthropic's messages.

`python pydantic_ai_agent.py BASE_URL KEY [--stream] [--responses | --messages]` prints
one JSON line.
"""

import asyncio
import json
import os
import sys

os.environ["LOGFIRE_SEND_TO_LOGFIRE"] = "false"

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

QUESTIONS = ["What is 12*13?", "And 7*8, and 9*11?", "Thank you 🙂"]
RESULTS = []


def model(url: str, key: str) -> object:
    if "--messages" in sys.argv:
        provider = AnthropicProvider(base_url=url.removesuffix("/v1"), api_key=key)
        return AnthropicModel("scripted", provider=provider)
    provider = OpenAIProvider(base_url=url, api_key=key)
    if "--responses" in sys.argv:
        return OpenAIResponsesModel("scripted", provider=provider)
    return OpenAIChatModel("scripted", provider=provider)


async def main() -> None:
    agent = Agent(model(*sys.argv[1:3]), system_prompt="Use the calculator.")

    @agent.tool_plain
    def calculator(expression: str) -> str:
        """Evaluates an arithmetic expression."""
        left, right = expression.split("*")
        RESULTS.append(str(int(left) * int(right)))
        return RESULTS[-1]

    answers = []
    history = []
    for question in QUESTIONS:
        if "--stream" in sys.argv:
            async with agent.iter(question, message_history=history) as run:
                async for node in run:
                    if Agent.is_model_request_node(node):
                        async with node.stream(run.ctx) as events:
                            async for _ in events:
                                pass
            result = run.result
        else:
            result = await agent.run(question, message_history=history)
        history = result.all_messages()
        answers.append(result.output)
    print(json.dumps({"answers": answers, "results": RESULTS}))


if __name__ == "__main__":
    asyncio.run(main())
