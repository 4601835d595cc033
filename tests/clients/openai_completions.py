"""The official `openai` client on text completions: each prompt goes on from the text
before.

`python openai_completions.py BASE_URL KEY [--stream]` prints one JSON line of what it
saw.
"""

import json
import sys

from openai import OpenAI


def main() -> None:
    url = sys.argv[1]
    key = sys.argv[2]
    stream = "--stream" in sys.argv
    client = OpenAI(base_url=url, api_key=key, max_retries=0)
    text = "Once upon a time ünïcödé 🙂"
    finishes = []
    added = []
    for _ in range(4):
        given = {"model": "scripted", "prompt": text, "max_tokens": 16}
        if stream:
            chunks = list(client.completions.create(**given, stream=True))
            piece = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
            finishes.append(
                [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][
                    -1
                ]
            )
        else:
            choice = client.completions.create(**given).choices[0]
            piece = choice.text
            finishes.append(choice.finish_reason)
        added.append(piece)
        text += piece + "\nAnd then "
    print(json.dumps({"answers": added, "finishes": finishes}))


if __name__ == "__main__":
    main()
