"""The tools that a request lets the model call, and what it forces. Pure."""

from __future__ import annotations

from invrl.errors import SessionError
from invrl.gateway.types import TurnRequest


def check_tool_choice(request: TurnRequest, *, shows_tools: bool) -> None:
    """Raise SessionError 400 if the template shows no tools to the model, or if the
    choice names a tool that the request does not have."""
    choice = request.tool_choice
    names = [tool.name for tool in request.tools]
    if request.tools and choice.mode != "none" and not shows_tools:
        reason = (
            "`tools` need a chat template that shows them, and this model's does not: give one with "
            "--chat-template-path FILE (chatml-tools, for models that speak ChatML, is shipped)"
        )
        raise SessionError(
            reason, status=400, code="unsupported_parameter", param="tools"
        )
    if choice.mode in ("required", "named") and not names:
        reason = "`tool_choice` asks for a call, `tools` has none"
        raise SessionError(
            reason, status=400, code="invalid_value", param="tool_choice"
        )
    chosen = choice.allowed
    if choice.mode == "named":
        chosen = (choice.name,)
    for name in chosen:
        if name not in names:
            reason = f"`tool_choice` names {name!r}, `tools` has {', '.join(names)}"
            raise SessionError(
                reason, status=400, code="invalid_value", param="tool_choice"
            )


def forcing_field(request: TurnRequest) -> str:
    """Return the field of the request that asks for the form of the reply to be
    forced."""
    mode = request.tool_choice.mode
    if mode in ("required", "named"):
        return f"tool_choice={mode}"
    return "response_format"
