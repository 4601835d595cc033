"""Fields of our dataclasses: carried from one class to another, and arrays that must
have one length."""

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray


def same_length(**arrays: NDArray[np.generic]) -> int:
    """Return the common length of the arrays. Raises ValueError if lengths differ."""
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"lengths differ: {lengths}")
    return next(iter(lengths.values()))


def field_values(instance: Any, of: type | None = None) -> dict[str, Any]:
    """Return the fields of a dataclass by name, for the constructor of another that has
    them too. `of` selects the fields of that base class. Unlike in
    `dataclasses.asdict`, dataclass fields are not converted."""
    return {
        member.name: getattr(instance, member.name) for member in fields(of or instance)
    }
