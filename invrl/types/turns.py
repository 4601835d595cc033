"""What was sampled: turns, and the branches that they make."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from invrl.types.fields import same_length
from invrl.types.weights import WeightVersion

FinishReason = Literal["stop", "length", "abort"]
"""Why a generation ended: by itself, at its token limit, or because it was
cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Sampled tokens [start, end) of a turn were drawn under the weights of
    `version`."""

    version: WeightVersion
    start: int
    end: int


def is_trainable(finish_reason: str, constrained: bool, has_grammar: bool) -> bool:
    """Whether the tokens of a turn may be trained if its answer was delivered: it was
    not aborted, and if a grammar constrained it, the grammar is known, so that the
    trainer can apply it too."""
    if finish_reason == "abort":
        return False
    return not constrained or has_grammar


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One generation. The engine consumed the ids of the path up to this turn, then
    `context_ids_T`, and emitted `sampled_ids_T`: the turns of a path, concatenated, are
    exactly the ids that the engine saw."""

    id: str
    session_id: str
    parent_id: str | None
    context_ids_T: NDArray[np.int32]
    sampled_ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    """Of the sampled ids, in nats."""
    spans: tuple[VersionSpan, ...]
    """Tile the sampled ids, without gaps."""
    finish_reason: FinishReason
    request_digest: str
    delivered: bool
    """The answer reached its client whole."""
    temperature: float
    prompt_tokens: int
    cached_tokens: int
    """Those of the prompt tokens whose keys and values the engine had cached."""
    fork_reason: str
    """Why this turn departs from what was recorded: it is a further root, or it
    branches off before a reply that the client replaced. "" for a first turn and for a
    turn that continues its parent."""
    started_at: float
    finished_at: float
    constrained: bool = False
    """A grammar restricted the tokens (forced tool call, JSON schema): `logprobs_T` are
    those of the model's distribution over the tokens that the grammar allowed."""
    grammar: str = ""
    """For a constrained turn that may be trained: the grammar, as JSON of SGLang's
    sampling parameter."""

    @property
    def trainable(self) -> bool:
        """Whether its tokens may be trained, once it is known to be `delivered`."""
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
        """The weight version of each sampled token."""
        versions_T = np.empty(len(self.sampled_ids_T), np.int32)
        for span in self.spans:
            versions_T[span.start : span.end] = span.version
        return versions_T


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One root-to-leaf branch of a session's turns."""

    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        parent_ids = [turn.parent_id for turn in self.turns]
        expected_ids = [None, *(turn.id for turn in self.turns[:-1])]
        if parent_ids != expected_ids:
            raise ValueError("the turns of a trajectory are not one root-to-leaf path")
