"""What was sampled: turns, and the trajectories that they make."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from invrl.types.fields import same_length
from invrl.types.weights import WeightVersion

FinishReason = Literal["stop", "length", "abort"]
"""Reason that a generation ended: by itself, at its token limit, or cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Sampled tokens [start, end) of a turn that were drawn under the weights of
    `version`."""

    version: WeightVersion
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Sampled tokens [start, end) of a moved turn that one engine sampled."""

    engine: str | None
    """Name that this start of the engine gives itself; None if it has none."""
    start: int
    end: int


def is_trainable(finish_reason: str, constrained: bool, has_grammar: bool) -> bool:
    """Whether the tokens of a delivered turn may be trained: it was not aborted, and
    any grammar that constrained it is known, so that the trainer can apply it too."""
    if finish_reason == "abort":
        return False
    return not constrained or has_grammar


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One generation. The engine consumed the ids of the trajectory up to this turn,
    then `context_ids_T`, and emitted `sampled_ids_T`: the concatenated turns of a
    trajectory are exactly the ids that the engine saw."""

    id: str
    session_id: str
    parent_id: str | None
    context_ids_T: NDArray[np.int32]
    sampled_ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    """Log-probs of the sampled ids, in nats."""
    spans: tuple[VersionSpan, ...]
    """Cover the sampled ids without gaps."""
    finish_reason: FinishReason
    request_digest: str
    delivered: bool
    """Whether the whole reply reached its client."""
    temperature: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values the engine had cached."""
    fork_reason: str
    """Reason that this turn departs from the recording: it is a further root, or it
    trajectories off before a reply that the client replaced. "" for a first turn and
    for a turn that continues its parent."""
    started_at: float
    finished_at: float
    constrained: bool = False
    """Whether a grammar restricted the tokens (forced tool call, JSON schema).
    `logprobs_T` are then of the model's distribution over the allowed tokens."""
    grammar: str = ""
    """Grammar of a constrained turn that may be trained, as JSON of SGLang's sampling
    parameter."""

    @property
    def trainable(self) -> bool:
        """Whether its tokens may be trained once it is `delivered`."""
        return is_trainable(self.finish_reason, self.constrained, bool(self.grammar))

    def __post_init__(self) -> None:
        num_sampled = same_length(
            sampled_ids_T=self.sampled_ids_T, logprobs_T=self.logprobs_T
        )
        end = 0
        for span in self.spans:
            if span.start != end or span.end < span.start:
                raise ValueError(
                    f"turn {self.id}: version spans do not tile the output: {self.spans}"
                )
            end = span.end
        if end != num_sampled:
            raise ValueError(
                f"turn {self.id}: spans end at {end}, {num_sampled} tokens were sampled"
            )

    @property
    def versions_T(self) -> NDArray[np.int32]:
        """Weight version of each sampled token."""
        versions_T = np.empty(len(self.sampled_ids_T), np.int32)
        for span in self.spans:
            versions_T[span.start : span.end] = span.version
        return versions_T


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One root-to-leaf path of a session's turns."""

    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        parent_ids = [turn.parent_id for turn in self.turns]
        expected_ids = [None, *(turn.id for turn in self.turns[:-1])]
        if parent_ids != expected_ids:
            raise ValueError("the turns of a trajectory are not one root-to-leaf path")
