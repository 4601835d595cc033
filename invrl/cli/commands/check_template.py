"""`invrl check-template`: tests a chat template against a corpus of conversations."""

from collections.abc import Sequence

from invrl.cli.arguments import split_options
from invrl.cli.command import CommandFailed
from invrl.errors import ConfigError
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.replies.parsers import choose_parsers
from invrl.gateway.rendering.template_check.template_check import (
    check_template as check_conversations,
)
from invrl.gateway.rendering.template_check.template_check import missing_tools, report
from invrl.run.processes.driver_commands import FAILURE_EXIT
from invrl.run.settings.run_config import ModelConfig
from invrl.user_code.model_folder import check_is_folder

_NO_KEEP_THINKING = "--no-keep-thinking"
_NO_LIMIT = 2**31
"""Vocabulary size that refuses no token id."""


def check_template(arguments: Sequence[str]) -> None:
    """usage: invrl check-template MODEL [--chat-template-path FILE]
    [--no-keep-thinking]

    Plays a corpus of conversations (tools, thinking, unicode, cut replies, ...) turn by
    turn, as the gateway does, and compares the result with the template's own
    rendering. A conversation is right if it is exact, or a fork with a reason; exit
    code 1 if one is wrong. Names the parsers that `auto` chooses, and plays calls as
    they read them, whole and streamed. The folder needs a tokenizer and no weights."""
    options, models = split_options(
        arguments, ["--chat-template-path"], [_NO_KEEP_THINKING]
    )
    if len(models) != 1:
        fix = "invrl check-template MODEL"
        raise ConfigError("check-template", models, "it takes one model folder", fix)
    folder = ModelConfig(model_path=models[0]).folder
    check_is_folder("check-template", models[0], folder)
    template = options.get("--chat-template-path", "")
    keep_thinking = _NO_KEEP_THINKING not in options
    renderer = load_renderer(
        str(folder), _NO_LIMIT, chat_template=template, keep_thinking=keep_thinking
    )
    parsers = choose_parsers("auto", "auto", renderer)
    findings = list(check_conversations(renderer, parsers))
    print(report(findings, parsers, missing_tools(renderer, parsers)))
    if any(finding.outcome == "wrong" for finding in findings):
        raise CommandFailed(FAILURE_EXIT)
