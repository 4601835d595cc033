"""Loads the renderer of a model folder: its tokenizer, its chat template and its end
tokens."""

from collections.abc import Sequence
from pathlib import Path

from invrl.gateway.config import ContentTokens
from invrl.gateway.rendering.chat_template import JinjaTemplate, template_sources
from invrl.gateway.rendering.content_marks import ControlTokens
from invrl.gateway.rendering.marked_tokenizer import MarkedTokenizer
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.thinking import END_THINK, THINK
from invrl.gateway.rendering.tokenizer import FastTokenizer, load_tokenizer
from invrl.gateway.types import Message, Prompt, Tool, ToolCall
from invrl.user_code.model_folder import end_ids, special_tokens

_ASK = Message("user", "x")
_CALL = Message("assistant", "", "y", (ToolCall("callid001", "probe", "{}"),))
_RESULT = Message("tool", "1", tool_call_id="callid001")
_CHAT = Prompt(messages=(_ASK, Message("assistant", "y"), _ASK))
_REPLY_WITH_CALL = Prompt(messages=(_ASK, _CALL))
_TOOL_LOOP = Prompt(messages=(_ASK, _CALL, _RESULT), tools=(Tool(name="probe"),))
_SYSTEM = Prompt(messages=(Message("system", "x"), _ASK))


def load_renderer(
    model_path: str,
    vocab_size: int,
    *,
    chat_template: str | None = None,
    keep_thinking: bool = True,
    special_tokens_in_content: ContentTokens = "plain",
) -> Renderer:
    """Return the renderer of a model folder. `chat_template` is the path of a file or
    the name of a shipped template, used instead of the folder's own. Raises ConfigError
    for a tokenizer that is missing or broken, and if there is no chat template."""
    folder = Path(model_path)
    tokenizer = load_tokenizer(folder)
    stop_ids = end_ids(folder)
    end_of_text = tokenizer.token_id(special_tokens(folder).get("eos_token", ""))
    if end_of_text is not None:
        stop_ids.add(end_of_text)
    sources = template_sources(model_path, chat_template)
    template = JinjaTemplate(sources, folder)
    control_tokens = ControlTokens()
    if special_tokens_in_content == "plain":
        control_tokens = _find_control_tokens(template, tokenizer)
        template = JinjaTemplate(sources, folder, control_tokens)
    return Renderer(
        template,
        MarkedTokenizer(tokenizer, control_tokens.contents),
        end_ids=frozenset(stop_ids),
        vocab_size=vocab_size,
        keep_thinking=keep_thinking,
    )


def _find_control_tokens(
    template: JinjaTemplate, tokenizer: FastTokenizer
) -> ControlTokens:
    """Return the tokens that the tokenizer calls special, and those that the template
    writes around contents (DeepSeek's role marks are not called special)."""
    added = tokenizer.added_tokens()
    in_chat = _written(template, added, [_CHAT, _SYSTEM])
    in_calls = _written(template, added, [_REPLY_WITH_CALL]) - in_chat
    written = in_chat | in_calls | _written(template, added, [_TOOL_LOOP])
    signs = frozenset(
        token
        for token in written
        if not token.replace(" ", "").isalnum() and token.strip()
    )
    contents = tokenizer.added_tokens(special_only=True) | signs
    return ControlTokens(
        contents=contents, replies=contents - in_calls - {THINK, END_THINK}
    )


def _written(
    template: JinjaTemplate, tokens: frozenset[str], prompts: Sequence[Prompt]
) -> frozenset[str]:
    """Return the tokens that the template writes for one of the prompts."""
    texts: list[str] = []
    for prompt in prompts:
        for add_generation_prompt in (False, True):
            try:
                texts.append(
                    template(prompt, add_generation_prompt=add_generation_prompt)
                )
            except Exception:  # a template may raise any exception: it does not take such a conversation
                continue
    return frozenset(token for token in tokens if any(token in text for text in texts))
