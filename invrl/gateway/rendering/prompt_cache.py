"""Caches the ids of prompts that begin a conversation: the members of a group send the
same one in quick succession. The number of characters is bounded, because a cached
prompt outlives its session."""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from invrl.gateway.types import Prompt

_MAX_PROMPTS = 64
_MAX_CHARACTERS = 2**22
"""Maximum number of characters of all cached prompts together."""
_MAX_PROMPT_CHARACTERS = 2**20
"""A longer prompt is not cached."""


class PromptCache:
    """Keeps the most recently used prompts. Several threads may use it."""

    def __init__(self) -> None:
        self._ids: OrderedDict[Prompt, array[int]] = OrderedDict()
        """Least recently used prompt first."""
        self._characters = 0
        self._lock = threading.Lock()

    def get(self, prompt: Prompt) -> list[int] | None:
        """Return the prompt's ids; None if they are not cached."""
        if prompt.characters > _MAX_PROMPT_CHARACTERS:
            return None
        with self._lock:
            ids = self._ids.get(prompt)
            if ids is None:
                return None
            self._ids.move_to_end(prompt)
        return ids.tolist()

    def put(self, prompt: Prompt, ids: Sequence[int]) -> None:
        characters = prompt.characters
        if characters > _MAX_PROMPT_CHARACTERS:
            return
        with self._lock:
            if prompt not in self._ids:
                self._characters += characters
            self._ids[prompt] = array("i", ids)
            while len(self._ids) > _MAX_PROMPTS or self._characters > _MAX_CHARACTERS:
                oldest, _ = self._ids.popitem(last=False)
                self._characters -= oldest.characters
