"""A rollout of a step as a row of a table: what a person reads at an experiment
tracker. Pure values."""

from dataclasses import astuple, dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRollout:
    """Texts are Unicode without lone surrogates and may hold anything else that a model
    says."""

    step: int
    task: str
    reward: float
    prompt: str
    """The last message before the first reply."""
    response: str
    """All replies, one after the other."""
    length: int
    """Sampled tokens."""
    reason: str
    """Why it failed although it counts, or "cut" where a reply ran out of tokens; else
    ""."""
    version: int
    """The newest weights that sampled it."""

    def cells(self) -> tuple[object, ...]:
        """In the order of `ROLLOUT_COLUMNS`."""
        return astuple(self)


ROLLOUT_COLUMNS = tuple(column.name for column in fields(SampledRollout))
