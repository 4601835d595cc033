"""The official `anthropic` client on messages: tools, several turns, whole or streamed,
tokens counted.

`python anthropic_messages.py BASE_URL KEY [--stream] [--forced]` prints one JSON line
of what it saw. The client adds `/v1` by itself. `--forced`: the first answer to each
question must be a call, of one of three expressions; the next must not.
"""

import json
import sys

from anthropic import Anthropic

TOOL = {
    "name": "calculator",
    "description": "Evaluates an arithmetic expression.",
    "input_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}
QUESTIONS = ["What is 12*13?", "And 7*8, and 9*11?", "Thank you 🙂"]


def calculator(expression: str) -> str:
    left, right = expression.split("*")
    return str(int(left) * int(right))


def main() -> None:
    url = sys.argv[1].removesuffix("/v1")
    key = sys.argv[2]
    stream = "--stream" in sys.argv
    forced = "--forced" in sys.argv
    if forced:
        TOOL["input_schema"]["properties"]["expression"]["enum"] = [
            "12*13",
            "7*8",
            "9*11",
        ]
    client = Anthropic(base_url=url, api_key=key, max_retries=0)
    messages: list = []
    answers = []
    results = []
    stops = []
    counted = []
    inputs = []
    events_seen = 0
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            given = {
                "model": "scripted",
                "system": "Use the calculator.",
                "messages": messages,
                "tools": [TOOL],
            }
            if forced:
                calling = {"type": "any", "disable_parallel_tool_use": True}
                given["tool_choice"] = (
                    calling if messages[-1]["content"] == question else {"type": "none"}
                )
            counted.append(client.messages.count_tokens(**given).input_tokens)
            if stream:
                with client.messages.stream(**given, max_tokens=512) as events:
                    events_seen += sum(1 for _ in events)
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(**given, max_tokens=512)
            stops.append(answer.stop_reason)
            usage = answer.usage
            inputs.append(usage.input_tokens + (usage.cache_read_input_tokens or 0))
            messages.append(
                {
                    "role": "assistant",
                    "content": [
                        block.model_dump(exclude_none=True) for block in answer.content
                    ],
                }
            )
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                break
            blocks = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": calculator(call.input["expression"]),
                }
                for call in calls
            ]
            results += [block["content"] for block in blocks]
            messages.append({"role": "user", "content": blocks})
        answers.append(
            "".join(block.text for block in answer.content if block.type == "text")
        )
    seen = {
        "answers": answers,
        "results": results,
        "stops": stops,
        "counted": counted,
        "inputs": inputs,
    }
    print(json.dumps(seen | {"events": events_seen}))


if __name__ == "__main__":
    main()
