"""Fields of our dataclasses: carried from one class to another, and arrays that must
have one length."""

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray


def same_length(**arrays: NDArray[np.generic]) -> int:
    """The common length of the arrays. Raises ValueError where lengths differ."""
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"lengths differ: {lengths}")
    return next(iter(lengths.values()))


def field_values(instance: Any, of: type | None = None) -> dict[str, Any]:
    """The fields of a dataclass by name, for the constructor of another one that has
    them too. `of`: only the fields of this base class. Unlike `dataclasses.asdict`,
    fields that are dataclasses stay what they are."""
    return {
        member.name: getattr(instance, member.name) for member in fields(of or instance)
    }
