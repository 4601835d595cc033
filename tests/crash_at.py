"""A crash at the n-th of the calls that a piece of work makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class CrashAt:
    """Counts the calls of all functions that it was given, and raises KeyboardInterrupt
    in place of one."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls = 0

    def within(self, real: Callable[P, T]) -> Callable[P, T]:
        def call(*arguments: P.args, **named: P.kwargs) -> T:
            self.calls += 1
            if self.calls == self.number:
                raise KeyboardInterrupt
            return real(*arguments, **named)

        return call
