"""LlamaIndex' ReAct agent with a calculator: calls are text, which it writes anew.

`python llama_index_react.py BASE_URL KEY` prints one JSON line.
"""

import asyncio
import json
import sys

from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai_like import OpenAILike

QUESTIONS = ["What is 12*13?", "And 7*8?", "Thank you 🙂"]
RESULTS = []


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    left, right = expression.split("*")
    RESULTS.append(str(int(left) * int(right)))
    return RESULTS[-1]


async def main() -> None:
    url, key = sys.argv[1:3]
    model = OpenAILike(
        model="scripted",
        api_base=url,
        api_key=key,
        is_chat_model=True,
        is_function_calling_model=False,
    )
    agent = ReActAgent(tools=[calculator], llm=model)
    memory = ChatMemoryBuffer.from_defaults(token_limit=100_000)
    answers = [str(await agent.run(question, memory=memory)) for question in QUESTIONS]
    print(json.dumps({"answers": answers, "results": RESULTS}))


if __name__ == "__main__":
    asyncio.run(main())
