"""What a step trains: the groups taken from the buffer, and the samples made of
them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from invrl.types.fields import same_length
from invrl.types.groups import Group
from invrl.types.routed_experts import RoutedExperts
from invrl.types.token_ages import TokenAges
from invrl.types.top_logprobs import TopLogprobs
from invrl.types.weights import WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBatch:
    """Whole groups, by id, that the buffer hands to the loop. Their tokens are read
    from the store."""

    batch_id: int
    version: WeightVersion
    """Version that the trainer holds when the batch is taken. Staleness is counted
    against it."""
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpan:
    """Tokens [start, end) of a sample that were sampled under `grammar` (as in `Turn`),
    from the grammar's beginning."""

    start: int
    end: int
    grammar: str


SOLVED_NUMBER = "solved"
"""Number of a sample: 1 if its rollout solved its task, else 0. Set if the objective
reads it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSample:
    """One training sample, flat: a trajectory of a rollout."""

    tokens_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]
    """Whether token t was sampled and is trained in this sample."""
    rollout_logprobs_T: NDArray[np.float32]
    """The engine's log-prob of token t in nats; 0 where the loss mask is False."""
    versions_T: NDArray[np.int32]
    """Weight version that sampled token t; -1 where the loss mask is False."""
    reward: float
    temperature: float
    group_id: str
    rollout_id: str
    attempt: int
    turn_ids: tuple[str, ...]
    turn_spans: tuple[tuple[int, int], ...] = ()
    """Tokens [start, end) that each of these turns sampled. Empty: the sample was not
    made of turns."""
    grammars: tuple[GrammarSpan, ...] = ()
    experts_TLK: RoutedExperts | None = None
    """Experts that computed token t in the engine; None: not recorded."""
    top_logprobs: TopLogprobs | None = None
    """Likeliest tokens under the engine's policy at token t; none where the loss mask
    is False. None: not recorded."""
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Further numbers of token t by name: log-probs of a teacher, process rewards, the
    user's own."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the whole sample by name."""

    def __post_init__(self) -> None:
        if self.experts_TLK is not None:
            same_length(tokens_T=self.tokens_T, experts_TLK=self.experts_TLK)
        if self.top_logprobs is not None:
            same_length(tokens_T=self.tokens_T, top_ids_TK=self.top_logprobs.ids_TK)
        same_length(tokens_T=self.tokens_T, **self.columns)
        length = same_length(
            tokens_T=self.tokens_T,
            loss_mask_T=self.loss_mask_T,
            rollout_logprobs_T=self.rollout_logprobs_T,
            versions_T=self.versions_T,
        )
        if length > 0 and self.loss_mask_T[0]:
            raise ValueError(
                f"rollout {self.rollout_id}: the first token has no log-prob to train"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCounts:
    """Counts of a mini-batch's trained parts over all ranks: the denominators of its
    loss. Parts without a trained token do not count."""

    tokens_of_rollout: Mapping[str, int]
    """Trained tokens by rollout id. A rollout may have several samples, also on several
    ranks."""
    tokens_of_group: Mapping[str, int]
    """Trained tokens by group id."""
    group_of_rollout: Mapping[str, str]
    """Rollout id -> group id."""
    samples: int
    solved_tokens: int = 0
    """Tokens of samples whose number `solved` is 1."""

    @property
    def tokens(self) -> int:
        return sum(self.tokens_of_rollout.values())

    @property
    def rollouts(self) -> int:
        return len(self.tokens_of_rollout)

    @property
    def groups(self) -> int:
        return len(self.tokens_of_group)

    @staticmethod
    def of(samples: Iterable[TrainSample]) -> "TrainedCounts":
        tokens_of_rollout: dict[str, int] = {}
        tokens_of_group: dict[str, int] = {}
        group_of_rollout: dict[str, str] = {}
        num_samples = 0
        solved_tokens = 0
        for sample in samples:
            num_trained = int(sample.loss_mask_T.sum())
            if num_trained == 0:
                continue
            num_samples += 1
            solved_tokens += (
                num_trained if sample.numbers.get(SOLVED_NUMBER) == 1.0 else 0
            )
            tokens_of_rollout[sample.rollout_id] = (
                tokens_of_rollout.get(sample.rollout_id, 0) + num_trained
            )
            tokens_of_group[sample.group_id] = (
                tokens_of_group.get(sample.group_id, 0) + num_trained
            )
            group_of_rollout[sample.rollout_id] = sample.group_id
        return TrainedCounts(
            tokens_of_rollout=tokens_of_rollout,
            tokens_of_group=tokens_of_group,
            group_of_rollout=group_of_rollout,
            samples=num_samples,
            solved_tokens=solved_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """Samples with one advantage per token: the whole batch, a mini-batch of it, or one
    data-parallel rank's share of a mini-batch."""

    batch_id: int
    version: WeightVersion
    samples: tuple[TrainSample, ...]
    advantages: tuple[NDArray[np.float32], ...]
    """One array [T] per sample; 0 where its loss mask is False."""
    counts: TrainedCounts | None = None
    """Counts of the whole mini-batch of which these samples are a share. None: they are
    all of it."""
    ages: TokenAges | None = None
    """Ages of the whole batch's tokens. None: no engine sampled them."""

    def __post_init__(self) -> None:
        if len(self.samples) != len(self.advantages):
            raise ValueError(
                f"{len(self.samples)} samples, {len(self.advantages)} advantages"
            )
        for sample, advantages_T in zip(self.samples, self.advantages, strict=True):
            same_length(tokens_T=sample.tokens_T, advantages_T=advantages_T)

    @property
    def trained(self) -> TrainedCounts:
        """Counts of the whole mini-batch, for a share as well."""
        return self.counts or TrainedCounts.of(self.samples)
