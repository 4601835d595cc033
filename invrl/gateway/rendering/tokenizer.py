"""The tokenizer of a model folder: text to ids and back.

transformers' tokenizer classes import torch, which would cost the gateway many seconds and 350 MB. This
module reads tokenizer.json with the tokenizers library instead. A test compares the two."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from invrl.gateway.rendering.model_files import read_json
from invrl.gateway.rendering.renderer import LARGE_TEXT, PromptTooLong
from invrl.gateway.rendering.token_bound import TokenBound, token_bound
from invrl.model_folder import read_tokenizer


class FastTokenizer:
    """The tokenizer in Rust. It adds no tokens of its own when it encodes."""

    def __init__(self, backend: Tokenizer, bound: TokenBound | None) -> None:
        self._backend = backend
        self._bound = bound

    def encode(self, text: str, *, max_ids: int | None = None) -> list[int]:
        """The ids of the text. PromptTooLong, with the exact number, if there are more than `max_ids`."""
        if len(text) < LARGE_TEXT:
            encoding = self._backend.encode(text, add_special_tokens=False)
        else:
            # Only `encode_batch` releases the interpreter lock, so that other threads run meanwhile.
            [encoding] = self._backend.encode_batch([text], add_special_tokens=False)
        # Checked before `.ids`, which would build a Python list of what may be millions of ids.
        if max_ids is not None and len(encoding) > max_ids:
            raise PromptTooLong(len(encoding), exact=True)
        return encoding.ids

    def min_tokens(self, text: str) -> int:
        """A lower bound of the text's number of tokens, found without tokenising it; 0 if none is known."""
        if self._bound is None:
            return 0
        return self._bound.min_tokens(text)

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        """The text of the ids. `special`: special tokens are included."""
        return self._backend.decode(ids, skip_special_tokens=not special)

    def token_id(self, token: str) -> int | None:
        """The id of a token; None if the vocabulary does not have it."""
        return self._backend.token_to_id(token)


def load_tokenizer(folder: Path) -> FastTokenizer:
    """The tokenizer of a model folder. Raises ConfigError as `read_tokenizer` does."""
    backend = read_tokenizer(folder)
    bound = token_bound(read_json(folder / "tokenizer.json"))
    return FastTokenizer(backend, bound)
