"""A rollout of a step as a row of a table in an experiment tracker. Pure values."""

from dataclasses import astuple, dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRollout:
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

    def cells(self) -> tuple[object, ...]:
        """Return the values in the order of `ROLLOUT_COLUMNS`."""
        return astuple(self)


ROLLOUT_COLUMNS = tuple(column.name for column in fields(SampledRollout))
