"""litellm: tools and several turns over chat completions, or with `--messages` over
Anthropic's messages.

`python litellm_client.py BASE_URL KEY [--stream] [--messages] [--forced]` prints one
JSON line. `--forced`: the first answer to each question must be a call, of one of three
expressions; the next must not.
"""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm  # after the setting, which it reads

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


def main() -> None:
    url = sys.argv[1]
    key = sys.argv[2]
    stream = "--stream" in sys.argv
    if "--messages" in sys.argv:
        where = {"model": "anthropic/scripted", "api_base": url.removesuffix("/v1")}
    else:
        where = {"model": "openai/scripted", "api_base": url}
    forced = "--forced" in sys.argv
    if forced:
        TOOL["function"]["parameters"]["properties"]["expression"]["enum"] = [
            "12*13",
            "7*8",
            "9*11",
        ]
    messages: list = [{"role": "system", "content": "Use the calculator."}]
    answers = []
    results = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            more = {}
            if forced:
                more["tool_choice"] = (
                    "required" if messages[-1]["role"] == "user" else "none"
                )
                more["parallel_tool_calls"] = False
            answer = litellm.completion(
                **where,
                api_key=key,
                messages=messages,
                tools=[TOOL],
                stream=stream,
                num_retries=0,
                max_tokens=512,
                **more,
            )
            if stream:
                answer = litellm.stream_chunk_builder(list(answer), messages=messages)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                result = calculator(json.loads(call.function.arguments)["expression"])
                results.append(result)
                messages.append(
                    {"role": "tool", "tool_call_id": call.id, "content": result}
                )
            if not message.tool_calls:
                break
        answers.append(message.content)
    print(json.dumps({"answers": answers, "results": results}))


if __name__ == "__main__":
    main()
