"""What the scripted engine says to agents with a calculator (or Codex's shell): one
script for all of them.

It reads a ChatML prompt and goes by the last message: a product to calculate becomes a
call, in Hermes' form, of `calculator` if that is offered; results become an answer that
holds them; everything else becomes small talk. Agents that must end by a tool
(`final_answer`) are obliged.
"""

from __future__ import annotations

import json
import re

_MESSAGE = re.compile(
    r"<\|im_start\|>(\w+)\n(.*?)(?=<\|im_end\|>|<\|im_start\|>|$)", re.DOTALL
)
_PRODUCT = re.compile(r"\d+\*\d+")
CODEX_COMMAND = "echo 156 > answer.txt && cat answer.txt"
_SHELLS = {
    "exec_command": {"cmd": CODEX_COMMAND},
    "shell_command": {"command": CODEX_COMMAND},
    "shell": {"command": ["bash", "-lc", CODEX_COMMAND]},
}
"""Codex's names for its shell, and what each wants."""


def calculating(prompt: str) -> str:
    # the last is the reply's head
    messages = [found.groups() for found in _MESSAGE.finditer(prompt)][:-1]
    if "<|im_start|>" not in prompt:  # a completion
        return "there was a number, and after it another one, and more and more of them came along."
    if "Action Input:" in prompt:
        return _reacting(messages)
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
            return (
                "I run it.\n" + call(shell, arguments)
                if "answer.txt" in asked
                else "Nothing to run."
            )
    products = _PRODUCT.findall(asked)
    if products and '"calculator"' in prompt:
        return "Let me see.\n" + "\n".join(
            call("calculator", {"expression": product}) for product in products
        )
    if '"final_answer"' in prompt:
        return call("final_answer", {"answer": "nothing to do"})
    return "You are wélcome 🙂"


_TASK = re.compile(r"Work in (\S+) for (\d+) steps")
_FILES = {  # a coding agent's names for what it does, and for what that takes
    "Write": ("Write", "Edit", "Read", "Bash", "file_path", "old_string", "new_string"),
    "write": ("write", "edit", "read", "bash", "filePath", "oldString", "newString"),
    "write_file": (
        "write_file",
        "replace",
        "read_file",
        "run_shell_command",
        "file_path",
        "old_string",
        "new_string",
    ),
}


def coding(prompt: str) -> str:
    """What it says to coding agents: as many steps as the task asks for, each with
    calls as models make them and as agents store them otherwise: files with space at
    line ends, `cd DIR &&`, arguments without their defaults, text beside a call,
    several calls at once."""
    task = _TASK.search(prompt)
    if task is None or '"name": "' not in prompt:
        return "A title for this"
    folder = task[1]
    steps = int(task[2])
    step = len(re.findall(r"<\|im_start\|>assistant\n[^<]*<tool_call>", prompt))
    if step >= steps and "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in prompt:
        return call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
    if step >= steps:
        return f"All {steps} steps are done. ✓"
    names = next(
        (names for name, names in _FILES.items() if f'"name": "{name}"' in prompt), None
    )
    said = ["", "Next step.\n", "Let me see.\n\n"][step % 3]
    if names is None:
        return said + call(
            "bash", {"command": f"cd {folder} && echo {step} >> steps.txt"}
        )
    write, edit, read, bash, path, old, new = names
    file = f"{folder}/file{step // 6}.py"
    shell = {"command": f"cd {folder} && ls", "description": "Lists the folder"}
    match step % 6:
        case 0:
            return said + call(
                write,
                {path: file, "content": f"def f():  \n    return {step}   \n\n\n"},
            )
        case 1:
            return said + call(read, {path: file})
        case 2:
            return said + call(edit, {path: file, old: "return", new: "return  \t1 + "})
        case 3:
            return said + call(bash, shell)
        case 4:
            count = {"command": f"wc -l {file}", "description": "Counts lines"}
            return said + call(bash, shell) + "\n" + call(bash, count)
        case _:
            shown = {
                "command": f"cd {folder} && cat {file}  ",
                "description": " Shows it ",
            }
            return said + call(bash, shown)


def call(name: str, arguments: dict) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _reacting(messages: list[tuple[str, str]]) -> str:
    """To an agent whose calls are text."""
    role, text = messages[-1]
    if text.startswith("Observation:"):
        return f"Thought: I can answer without using any more tools.\nAnswer: It is {text[12:].strip()}."
    products = _PRODUCT.findall(text)
    if role == "user" and products:
        shown = json.dumps({"expression": products[0]}, indent=1)
        return f"Thought: I need a tool.\nAction: calculator\nAction Input: {shown}\n"
    return "Thought: I can answer without using any more tools.\nAnswer: You are wélcome 🙂"


def _result(role: str, text: str) -> str | None:
    """What a tool returned, if the message tells that."""
    if role == "tool":
        return text.strip()
    if role == "user" and (
        found := re.search(
            r"<tool_response>\n?(.*?)\n?</tool_response>", text, re.DOTALL
        )
    ):
        return found[1].strip()
    if (
        role == "user" and text.startswith("Observation") and "New task:" not in text
    ):  # smolagents
        return text.partition("\n")[2].strip()
    return None
