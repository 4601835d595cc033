"""The official `google-genai` client on generateContent: tools that the client calls by
itself, several turns, whole or streamed, tokens counted.

`python google_genai.py BASE_URL KEY [--stream]` prints one JSON line of what it saw.
The client adds `/v1beta` by itself.
"""

import json
import sys

from google import genai
from google.genai import types

QUESTIONS = ["What is 12*13?", "And 7*8, and 9*11?", "Thank you 🙂"]


def main() -> None:
    url = sys.argv[1].removesuffix("/v1")
    stream = "--stream" in sys.argv
    results: list = []

    def calculator(expression: str) -> str:
        """Evaluates an arithmetic expression."""
        left, right = expression.split("*")
        results.append(str(int(left) * int(right)))
        return results[-1]

    client = genai.Client(
        api_key=sys.argv[2], http_options=types.HttpOptions(base_url=url)
    )
    model = "gemini-2.5-flash"
    config = types.GenerateContentConfig(
        system_instruction="Use the calculator.",
        tools=[calculator],
        max_output_tokens=512,
    )
    chat = client.chats.create(model=model, config=config)
    answers = []
    finishes = []
    counted = []
    for question in QUESTIONS:
        contents = [*chat.get_history(), types.UserContent(question)]
        count = client.models.count_tokens(model=model, contents=contents)
        counted.append(count.total_tokens)
        if stream:
            pieces = list(chat.send_message_stream(question))
            text = ""
            for piece in pieces:
                text += piece.text or ""
                if piece.function_calls:
                    text = ""
            answers.append(text)
        else:
            pieces = [chat.send_message(question)]
            answers.append(pieces[-1].text)
        finishes.append(pieces[-1].candidates[0].finish_reason.value)
    models = [card.name for card in client.models.list()]
    seen = {
        "answers": answers,
        "results": results,
        "finishes": finishes,
        "counted": counted,
        "models": models,
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
