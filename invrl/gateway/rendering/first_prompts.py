"""The ids of conversations' first prompts, for the members of a group: they ask the same, one soon after the
other. Bounded by characters, because prompts outlive their sessions here. Used from several threads."""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from invrl.gateway.types import Prompt

_MOST_PROMPTS = 64
_MOST_CHARACTERS = 2**22
"""Of all prompts together."""
_LONGEST_PROMPT = 2**20
"""Characters of a prompt that is kept."""


class FirstPrompts:
    """The latest ones; what was asked for longest ago goes first."""

    def __init__(self) -> None:
        self._ids: OrderedDict[Prompt, array[int]] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def ids(self, prompt: Prompt) -> list[int] | None:
        if prompt.characters > _LONGEST_PROMPT:
            return None
        with self._lock:
            kept = self._ids.get(prompt)
            if kept is None:
                return None
            self._ids.move_to_end(prompt)
        return kept.tolist()

    def keep(self, prompt: Prompt, ids: Sequence[int]) -> None:
        characters = prompt.characters
        if characters > _LONGEST_PROMPT:
            return
        with self._lock:
            if prompt not in self._ids:
                self._characters += characters
            self._ids[prompt] = array("i", ids)
            while len(self._ids) > _MOST_PROMPTS or self._characters > _MOST_CHARACTERS:
                oldest, _ = self._ids.popitem(last=False)
                self._characters -= oldest.characters
