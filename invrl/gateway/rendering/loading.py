"""Loads the renderer of a model folder: its tokenizer, its chat template and its end tokens."""

from pathlib import Path

from invrl.gateway.rendering.chat_template import JinjaTemplate, template_sources
from invrl.gateway.rendering.model_files import end_ids, special_tokens
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.tokenizer import load_tokenizer


def load_renderer(
    model_path: str, vocab_size: int, *, chat_template: str = "", keep_thinking: bool = True
) -> Renderer:
    """The renderer of a model folder. `chat_template`: the path of a file or the name of a shipped template,
    used instead of the folder's own. Raises ConfigError for a tokenizer that is missing or broken, and if
    there is no chat template."""
    folder = Path(model_path)
    tokenizer = load_tokenizer(folder)
    stop_ids = end_ids(folder)
    end_of_text = tokenizer.token_id(special_tokens(folder).get("eos_token", ""))
    if end_of_text is not None:
        stop_ids.add(end_of_text)
    template = JinjaTemplate(template_sources(model_path, chat_template), folder)
    return Renderer(
        template,
        tokenizer,
        end_ids=frozenset(stop_ids),
        vocab_size=vocab_size,
        keep_thinking=keep_thinking,
    )
