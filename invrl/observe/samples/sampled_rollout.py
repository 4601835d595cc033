"""A rollout of a step as a row of a table in an experiment tracker. Pure values."""

from typing import NamedTuple


class SampledRollout(NamedTuple):
    """One rollout. Texts are Unicode without lone surrogates, otherwise as the model
    wrote them."""

    step: int
    task: str
    reward: float
    prompt: str
    """Last message before the first reply."""
    response: str
    """All replies, one after the other."""
    length: int
    """Sampled tokens."""
    reason: str
    """Reason that it failed although it counts, or "cut" if a reply ran out of tokens;
    else ""."""
    version: int
    """Newest weights that sampled it."""
