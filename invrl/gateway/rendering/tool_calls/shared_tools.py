"""Keeps one object per tool in a gateway process: agents send the same tools with every
request."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from invrl.gateway.types import Tool


class SharedTools:
    """Replaces equal tools by one object, which is freed when nothing uses it."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Tool, weakref.ref[Tool]] = (
            weakref.WeakKeyDictionary()
        )

    def share(self, tools: Iterable[Tool]) -> tuple[Tool, ...]:
        """Return shared tools equal to `tools`, in order."""
        return tuple(self._shared(tool) for tool in tools)

    def _shared(self, tool: Tool) -> Tool:
        reference = self._known.get(tool)
        if reference is not None:
            known = reference()
            if known is not None:
                return known
        self._known[tool] = weakref.ref(tool)
        return tool
