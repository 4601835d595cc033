"""An agent of Google's Agent Development Kit with a calculator, over generateContent.

`python google_adk_agent.py BASE_URL KEY [--stream]` prints one JSON line.
"""

import asyncio
import json
import os
import sys

from google.adk.agents import Agent, RunConfig
from google.adk.agents.run_config import StreamingMode
from google.adk.runners import InMemoryRunner
from google.genai import types

QUESTIONS = ["What is 12*13?", "And 7*8, and 9*11?", "Thank you 🙂"]
RESULTS = []


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    left, right = expression.split("*")
    RESULTS.append(str(int(left) * int(right)))
    return RESULTS[-1]


async def main() -> None:
    os.environ["GOOGLE_GEMINI_BASE_URL"] = sys.argv[1].removesuffix("/v1")
    os.environ["GOOGLE_API_KEY"] = sys.argv[2]
    agent = Agent(
        name="calculating",
        model="gemini-2.5-flash",
        instruction="Use the calculator.",
        tools=[calculator],
    )
    runner = InMemoryRunner(agent=agent)
    session = await runner.session_service.create_session(
        app_name=runner.app_name, user_id="user"
    )
    mode = StreamingMode.SSE if "--stream" in sys.argv else StreamingMode.NONE
    answers = []
    for question in QUESTIONS:
        async for event in runner.run_async(
            user_id="user",
            session_id=session.id,
            new_message=types.UserContent(question),
            run_config=RunConfig(streaming_mode=mode),
        ):
            if event.is_final_response() and not event.partial:
                answer = "".join(part.text or "" for part in event.content.parts)
        answers.append(answer)
    print(json.dumps({"answers": answers, "results": RESULTS}))


if __name__ == "__main__":
    asyncio.run(main())
