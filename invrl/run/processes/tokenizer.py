"""The tokenizer of a run: its chat template, and the copy in the run's folder, which
later shows its tokens as text."""

import logging

from invrl.run.settings.config import Config
from invrl.store.run_folder import RunFolder
from invrl.store.tokenizer_folder import copy_tokenizer

logger = logging.getLogger(__name__)


def keep_tokenizer(config: Config, folder: RunFolder) -> None:
    """Copy the tokenizer into the folder. An error is only logged: the run does not
    need the copy."""
    try:
        template = chat_template_override(config)
        copy_tokenizer(
            config.model.folder, folder.tokenizer_path, chat_template=template
        )
    except OSError:
        logger.exception("the tokenizer cannot be copied")


def chat_template_override(config: Config) -> str:
    """Return the chat template that replaces the model's own; "" if none does."""
    if not config.gateway.chat_template_path:
        return ""
    # loads the tokenizers' library
    from invrl.gateway.rendering.chat_template import read_template

    return read_template(config.gateway.chat_template_path)
