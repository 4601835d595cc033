"""Two tools, and replies of the fake engine that call them."""

from __future__ import annotations

from running_gateway import Running

from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.parsers import Parsers

END = 2
PARSERS = Parsers(tool_calls="qwen25", reasoning="qwen3")
CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Computes.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
        },
    },
}
SHELL = {"type": "function", "function": {"name": "shell"}}


def say(gateway: Running, renderer: Renderer, *texts: str) -> None:
    """The engine's next replies; the last one is repeated."""
    remaining = list(texts)

    def reply(_: object) -> list[int]:
        text = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        return [*renderer.encode(text), END]

    gateway.engine.script = reply
