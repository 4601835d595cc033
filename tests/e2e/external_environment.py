"""An environment that invrl does not start: a program of its own, plain HTTP, no import
of invrl.

`python external_environment.py URL KEY LOG` waits for the gateway, leases tasks until
the run has ended, and writes one JSON line per session. The first lease is let run out.
Each rollout has a child session, and its second turn a reward of its own. Its calls are
spans of traces of its own."""

from __future__ import annotations

import hashlib
import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

SPAN_ID = "00f067aa0ba902b7"


def trace_id(session_id: str, num_messages: int) -> str:
    """Of the call with so many messages."""
    return hashlib.blake2b(
        f"{session_id} {num_messages}".encode(), digest_size=16
    ).hexdigest()


def call(
    url: str, key: str, body: dict[str, Any], **more_headers: str
) -> dict[str, Any]:
    headers = {
        "Authorization": f"Bearer {key}",
        "Content-Type": "application/json",
        **more_headers,
    }
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def ask(session: dict[str, Any], messages: list[dict[str, str]]) -> tuple[str, str]:
    body = {"model": session["model"], "messages": messages}
    traceparent = f"00-{trace_id(session['id'], len(messages))}-{SPAN_ID}-01"
    url = session["base_url"] + "/chat/completions"
    answer = call(url, session["key"], body, traceparent=traceparent)
    return answer["choices"][0]["message"]["content"], answer["id"].removeprefix(
        "chatcmpl-"
    )


def even(text: str) -> float:
    return sum(ord(letter) % 2 == 0 for letter in text) / max(len(text), 1)


def rollout(base: str, session: dict[str, Any], prompt: str) -> dict[str, Any]:
    own = f"{base}/sessions/{session['id']}"
    messages = [{"role": "user", "content": prompt}]
    first, _ = ask(session, messages)
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "again"},
    ]
    second, turn = ask(session, messages)
    [child] = call(own + "/children", session["key"], {})["sessions"]
    ask(child, [{"role": "user", "content": "a child"}])
    call(
        own + "/reward",
        session["key"],
        {"reward": even(second), "turn": turn, "components": {"late": 1.0}},
    )
    return call(own + "/finish", session["key"], {"reward": even(first) + even(second)})


def wait_for(url: str) -> None:
    end = time.monotonic() + 800
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except OSError:
            time.sleep(0.5)
    sys.exit(f"no answer from {url}")


def main(base: str, key: str, log: str) -> None:
    wait_for(base + "/health")
    let_go = False
    with open(log, "a", buffering=1) as out:
        while not (answer := call(base + "/tasks/lease", key, {"wait_s": 10}))["ended"]:
            lease = answer["lease"]
            if lease is None:
                continue
            place = {"group_id": lease["group_id"], "members": lease["members"]}
            if not let_go:
                let_go = True
                out.write(json.dumps({"let_go": place}) + "\n")
                continue
            opening = {
                "task_id": lease["task"]["id"],
                **place,
                "request_id": json.dumps(place),
            }
            try:
                for session in call(base + "/sessions", key, opening)["sessions"]:
                    ended = rollout(base, session, lease["task"]["payload"]["prompt"])
                    out.write(json.dumps({**ended, "key": session["key"]}) + "\n")
            except urllib.error.HTTPError as refused:
                code = json.load(refused)["error"]["code"]
                if code not in ("group_dropped", "not_leased", "run_ended"):
                    raise


if __name__ == "__main__":
    main(*sys.argv[1:])
