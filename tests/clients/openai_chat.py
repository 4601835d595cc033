"""The official `openai` client on chat completions: tools, several turns, whole or
streamed.

`python openai_chat.py BASE_URL KEY [--stream] [--forced]` prints one JSON line.
`--forced`: the first answer to each question must be a call, of one of three
expressions; the next must not.
"""

import json
import sys

from openai import LengthFinishReasonError, OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
QUESTIONS = ["What is 12*13?", "And 7*8, and 9*11?", "Thank you 🙂"]


def calculator(expression: str) -> str:
    left, right = expression.split("*")
    return str(int(left) * int(right))


def ask(client: OpenAI, messages: list, stream: bool, forced: bool):
    given = {"model": "scripted", "messages": messages, "tools": [TOOL]}
    if forced:
        given["tool_choice"] = "required" if messages[-1]["role"] == "user" else "none"
        given["parallel_tool_calls"] = False
    if not stream:
        answer = client.chat.completions.create(**given)
        return answer.choices[0], answer.usage
    try:
        with client.chat.completions.stream(
            **given, stream_options={"include_usage": True}
        ) as events:
            for _ in events:
                pass
            answer = events.get_final_completion()
    except LengthFinishReasonError as cut:
        answer = cut.completion
    return answer.choices[0], answer.usage


def main() -> None:
    url = sys.argv[1]
    key = sys.argv[2]
    stream = "--stream" in sys.argv
    forced = "--forced" in sys.argv
    if forced:
        TOOL["function"]["parameters"]["properties"]["expression"]["enum"] = [
            "12*13",
            "7*8",
            "9*11",
        ]
    client = OpenAI(base_url=url, api_key=key, max_retries=0)
    messages: list = [{"role": "system", "content": "Use the calculator."}]
    answers = []
    results = []
    finishes = []
    tokens = 0
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            choice, usage = ask(client, messages, stream, forced)
            tokens += usage.completion_tokens
            finishes.append(choice.finish_reason)
            messages.append(
                choice.message.model_dump(
                    exclude_none=True, include={"role", "content", "tool_calls"}
                )
            )
            for call in choice.message.tool_calls or []:
                result = calculator(json.loads(call.function.arguments)["expression"])
                results.append(result)
                messages.append(
                    {"role": "tool", "tool_call_id": call.id, "content": result}
                )
            if not choice.message.tool_calls:
                break
        answers.append(choice.message.content)
    seen = {
        "answers": answers,
        "results": results,
        "finishes": finishes,
        "tokens": tokens,
    }
    print(json.dumps(seen | {"models": [model.id for model in client.models.list()]}))


if __name__ == "__main__":
    main()
