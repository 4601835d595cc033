"""What a renderer needs of a model: its tokenizer and its chat template."""

from collections.abc import Sequence
from typing import Protocol

from invrl.gateway.types import Message, Prompt


class TextTokenizer(Protocol):
    """Tokenizer that a renderer needs."""

    @property
    def begin_ids(self) -> Sequence[int]:
        """Ids before every text that no template has rendered."""
        ...

    def encode(
        self, text: str, *, inside: bool = False, max_ids: int | None = None
    ) -> list[int]:
        """Return the ids of the text. Raises PromptTooLong, with the exact number, if
        there are more than `max_ids`. `inside`: the text follows other tokens."""
        ...

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the text's number of tokens, found without tokenizing
        it; 0 if none is known."""
        ...

    def decode(
        self, ids: Sequence[int], *, special: bool, inside: bool = False
    ) -> str: ...

    def preload(self) -> None: ...


class Template(Protocol):
    """Chat template of a model."""

    def __call__(self, prompt: Prompt, *, add_generation_prompt: bool) -> str: ...

    def num_control_tokens(self, messages: Sequence[Message]) -> int:
        """Count the texts of control tokens in the messages, which are rendered as
        plain text."""
        return 0

    def last_marked_reply(self, prompt: Prompt) -> tuple[int, int] | None:
        """Return beginning and end of the last text in the rendered messages that the
        template itself marks as a reply of the model; None if it marks none."""
        return None
