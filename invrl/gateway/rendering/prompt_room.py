"""How many tokens a prompt may have."""

from dataclasses import dataclass

LARGE_TEXT = 32_768
"""Characters. A longer text is tokenized so that other threads run meanwhile, and only
after a lower bound of its length was compared with the available room."""


class PromptTooLong(Exception):
    """The prompt has more tokens than there is room for. `tokens` is their number if
    `exact`, otherwise a lower bound of it."""

    def __init__(self, tokens: int, *, exact: bool) -> None:
        super().__init__(f"{tokens} tokens")
        self.tokens = tokens
        self.exact = exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Number of tokens that a prompt may have. `exact`: a longer prompt is counted, not
    estimated."""

    tokens: int
    exact: bool = False
