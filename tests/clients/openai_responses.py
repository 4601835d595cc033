"""The official `openai` client on responses: function tools, several turns, whole or
streamed.

`python openai_responses.py BASE_URL KEY [--stream] [--previous] [--forced]` prints one
JSON line of what it saw. `--previous`: continue by `previous_response_id`, without
sending all items again. `--forced`: the first answer to each question must be a call,
of one of three expressions; the next must not.
"""

import json
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "name": "calculator",
    "description": "Evaluates an arithmetic expression.",
    "parameters": {
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
    url = sys.argv[1]
    key = sys.argv[2]
    stream = "--stream" in sys.argv
    previous = "--previous" in sys.argv
    forced = "--forced" in sys.argv
    if forced:
        TOOL["parameters"]["properties"]["expression"]["enum"] = [
            "12*13",
            "7*8",
            "9*11",
        ]
    client = OpenAI(base_url=url, api_key=key, max_retries=0)
    items: list = []
    answers = []
    results = []
    last = None
    deltas = 0
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        while True:
            given = {
                "model": "scripted",
                "instructions": "Use the calculator.",
                "input": items,
                "tools": [TOOL],
            }
            if forced:
                given["parallel_tool_calls"] = False
                given["tool_choice"] = (
                    "required" if items[-1].get("role") == "user" else "none"
                )
            if previous and last is not None:
                given["previous_response_id"] = last.id
            if stream:
                with client.responses.stream(**given) as events:
                    for event in events:
                        deltas += event.type.endswith(".delta")
                        if event.type in ("response.completed", "response.incomplete"):
                            last = event.response
            else:
                last = client.responses.create(**given)
            items = (
                []
                if previous
                else [
                    *items,
                    *(item.model_dump(exclude_none=True) for item in last.output),
                ]
            )
            calls = [item for item in last.output if item.type == "function_call"]
            for call in calls:
                result = calculator(json.loads(call.arguments)["expression"])
                results.append(result)
                items.append(
                    {
                        "type": "function_call_output",
                        "call_id": call.call_id,
                        "output": result,
                    }
                )
            if not calls:
                break
        answers.append(last.output_text)
    print(
        json.dumps(
            {
                "answers": answers,
                "results": results,
                "deltas": deltas,
                "status": last.status,
            }
        )
    )


if __name__ == "__main__":
    main()
