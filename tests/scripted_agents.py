"""What the scripted engine says to agents with a calculator (or Codex's shell): one script for all of them.

It reads a ChatML prompt and goes by the last message: a product to calculate becomes a call, in Hermes' form,
of `calculator` if that is offered; results become an answer that holds them; everything else becomes small
talk. Agents that must end by a tool (`final_answer`) are obliged.
"""

from __future__ import annotations

import json
import re

_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?=<\|im_end\|>|<\|im_start\|>|$)", re.DOTALL)
_PRODUCT = re.compile(r"\d+\*\d+")
CODEX_COMMAND = "echo 156 > answer.txt && cat answer.txt"
_SHELLS = {
    "exec_command": {"cmd": CODEX_COMMAND},
    "shell_command": {"command": CODEX_COMMAND},
    "shell": {"command": ["bash", "-lc", CODEX_COMMAND]},
}
"""Codex's names for its shell, and what each wants."""


def calculating(prompt: str) -> str:
    messages = [found.groups() for found in _MESSAGE.finditer(prompt)][:-1]  # the last is the reply's head
    if "<|im_start|>" not in prompt:  # a completion
        return "there was a number, and after it another one, and more and more of them came along."
    results: list[str] = []
    while messages and (result := _result(*messages[-1])) is not None:
        results.insert(0, result)
        messages.pop()
    asked = messages[-1][1].rpartition("New task:")[2] if messages else ""
    if results:
        if '"final_answer"' in prompt:
            return call("final_answer", {"answer": results[-1]})
        return f"The result is {' and '.join(results)}. ✓"
    for shell, arguments in _SHELLS.items():
        if f'"name": "{shell}"' in prompt:
            return "I run it.\n" + call(shell, arguments) if "answer.txt" in asked else "Nothing to run."
    products = _PRODUCT.findall(asked)
    if products and '"calculator"' in prompt:
        return "Let me see.\n" + "\n".join(call("calculator", {"expression": one}) for one in products)
    if '"final_answer"' in prompt:
        return call("final_answer", {"answer": "nothing to do"})
    return "You are wélcome 🙂"


def call(name: str, arguments: dict) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _result(role: str, text: str) -> str | None:
    """What a tool returned, if the message tells that."""
    if role == "tool":
        return text.strip()
    if role == "user" and (
        found := re.search(r"<tool_response>\n?(.*?)\n?</tool_response>", text, re.DOTALL)
    ):
        return found[1].strip()
    if role == "user" and text.startswith("Observation") and "New task:" not in text:  # smolagents
        return text.partition("\n")[2].strip()
    return None
