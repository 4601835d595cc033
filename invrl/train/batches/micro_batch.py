"""A packed micro-batch, which the model computes in one pass, and the sequences that it
was packed from.

Axes: P packed tokens, N wanted tokens (those whose log-prob is needed), U rows of
logits, M of them under a grammar, T tokens of one sequence. Pure numpy.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from invrl.types.batches import TrainSample
from invrl.types.routed_experts import unknown_expert

UNKNOWN_EXPERT = -1
"""Replaces recorded experts: there is no record, and the router chooses."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSequence:
    """A sequence, and its tokens whose log-prob is wanted."""

    tokens_T: NDArray[np.int32]
    wanted_N: NDArray[np.int64]
    """Positions of the wanted tokens, ascending, each >= 1."""
    temperature: float
    allowed_N: tuple[bytes | None, ...] = ()
    """Tokens that the grammar of each wanted token allowed: one bit per token of the
    vocabulary, the lowest bit first; None means the whole vocabulary. Empty: the whole
    vocabulary for all of them."""
    experts_TLK: NDArray[np.int16] | None = None
    """Experts that each token is sent to, `UNKNOWN_EXPERT` where not known. None: of no
    token."""
    candidates_NK: NDArray[np.int32] | None = None
    """Further tokens whose log-probs are wanted at each wanted token; `NO_TOKEN` where
    there is none. None: nowhere."""

    @property
    def num_computed(self) -> int:
        """Number of tokens that the model must see: those before the last wanted
        one."""
        if len(self.wanted_N) == 0:
            return 0
        return int(self.wanted_N[-1])


def token_sequences(samples: Iterable[TrainSample]) -> list[TokenSequence]:
    """Make one sequence per sample; its trained tokens are the wanted ones."""
    sequences: list[TokenSequence] = []
    for sample in samples:
        wanted_N = np.flatnonzero(sample.loss_mask_T)
        sequences.append(
            TokenSequence(
                tokens_T=sample.tokens_T,
                wanted_N=wanted_N,
                temperature=sample.temperature,
            )
        )
    return sequences


def replayed_experts(sample: TrainSample) -> NDArray[np.int16] | None:
    """Return the experts of a sample's tokens, as in `TokenSequence`."""
    recorded_TLK = sample.experts_TLK
    if recorded_TLK is None:
        return None
    is_unknown = recorded_TLK == unknown_expert(recorded_TLK.dtype)
    return np.where(is_unknown, UNKNOWN_EXPERT, recorded_TLK.astype(np.int16))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBlock:
    """One attention call: queries [start, end) of the packed tokens attend to the
    prefix, then to [start, end)."""

    start: int
    end: int
    prefix_K: NDArray[np.int64]
    """Places of the ancestors among the packed tokens, root first."""
    mask_QK: NDArray[np.bool_] | None
    """[end - start, len(prefix_K) + end - start], True where a query sees a key. None:
    a query sees the whole prefix, and of [start, end) itself and those before it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OldRouting:
    """Experts that computed a micro-batch's tokens in the pass for the old log-probs,
    in each layer of the model, and the router's scores of them. Known for the layers
    and tokens that this rank routes."""

    experts_PLK: NDArray[np.int16]
    """`UNKNOWN_EXPERT` where not known."""
    scores_PLK: NDArray[np.float32]
    """Logarithms of shares of all experts' scores; 0 where not known."""

    def padded_to(self, num_tokens: int) -> "OldRouting":
        """Pad to this number of tokens; the added ones are unknown."""
        more = ((0, num_tokens - len(self.experts_PLK)), (0, 0), (0, 0))
        return OldRouting(
            experts_PLK=np.pad(self.experts_PLK, more, constant_values=UNKNOWN_EXPERT),
            scores_PLK=np.pad(self.scores_PLK, more),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Packed tokens, wanted tokens (sequence by sequence, in the order of `sequences`),
    and the sequences of logits that predict them."""

    tokens_P: NDArray[np.int64]
    positions_P: NDArray[np.int64]
    blocks: tuple[AttentionBlock, ...]
    ends_P: NDArray[np.int64]
    """End (exclusive) of the tokens that see a packed token, which begin at its own
    place: the token and its descendants."""
    sequences_P: NDArray[np.int64]
    """Number of sequences that have the packed token: more than one in a shared prefix,
    none in padding."""
    project_U: NDArray[np.int64]
    """Places of the packed tokens whose output is projected to logits, ascending. A
    place occurs once per temperature and set of allowed tokens."""
    temperature_U: NDArray[np.float32]
    restricted_M: NDArray[np.int64]
    """Indices of the rows of logits whose vocabulary a grammar restricts."""
    allowed_MW: NDArray[np.uint8]
    """Tokens that each of them allows, as bits (the lowest first)."""
    projection_N: NDArray[np.int64]
    """Index of the row of logits that predicts each wanted token."""
    targets_N: NDArray[np.int64]
    sequences: tuple[tuple[int, NDArray[np.int64]], ...]
    """(index of the sequence, positions of its wanted tokens)."""
    experts_PLK: NDArray[np.int16] | None = None
    """The K experts that each token is sent to in each layer of the model, by an
    earlier pass's choice; `UNKNOWN_EXPERT` where unknown. None: the routers choose."""
    candidates_NK: NDArray[np.int64] | None = None
    """Candidates of `TokenSequence`, sequence by sequence."""
    old_routing: "OldRouting | None" = None
    """None: nothing is compared with the old policy's routers."""

    @property
    def num_unrecorded(self) -> int:
        """Number of tokens whose experts are unknown in all layers."""
        if self.experts_PLK is None:
            return len(self.tokens_P)
        return int((self.experts_PLK == UNKNOWN_EXPERT).all(axis=(1, 2)).sum())

    def padded_to(self, num_tokens: int) -> "MicroBatch":
        """Pad to this number of packed tokens. The added ones are a separate tree
        without wanted tokens."""
        start = len(self.tokens_P)
        num_more = num_tokens - start
        if num_more == 0:
            return self
        block = AttentionBlock(
            start=start, end=num_tokens, prefix_K=_NO_PLACES, mask_QK=None
        )
        experts_PLK = self.experts_PLK
        if experts_PLK is not None:
            more = ((0, num_more), (0, 0), (0, 0))
            experts_PLK = np.pad(experts_PLK, more, constant_values=UNKNOWN_EXPERT)
        return replace(
            self,
            tokens_P=np.concatenate([self.tokens_P, np.zeros(num_more, np.int64)]),
            positions_P=np.concatenate([self.positions_P, np.arange(num_more)]),
            ends_P=np.concatenate([self.ends_P, np.full(num_more, num_tokens)]),
            sequences_P=np.concatenate(
                [self.sequences_P, np.zeros(num_more, np.int64)]
            ),
            blocks=(*self.blocks, block),
            experts_PLK=experts_PLK,
            old_routing=None
            if self.old_routing is None
            else self.old_routing.padded_to(num_tokens),
        )

    def with_projections(self, is_kept_U: NDArray[np.bool_]) -> "MicroBatch":
        """Select these rows of logits, and the wanted tokens that they predict."""
        number_U = np.cumsum(is_kept_U) - 1
        is_kept_M = is_kept_U[self.restricted_M]
        is_kept_N = is_kept_U[self.projection_N]
        sequences: list[tuple[int, NDArray[np.int64]]] = []
        start = 0
        for sequence_index, wanted_N in self.sequences:
            end = start + len(wanted_N)
            sequences.append((sequence_index, wanted_N[is_kept_N[start:end]]))
            start = end
        return replace(
            self,
            project_U=self.project_U[is_kept_U],
            temperature_U=self.temperature_U[is_kept_U],
            restricted_M=number_U[self.restricted_M[is_kept_M]],
            allowed_MW=self.allowed_MW[is_kept_M],
            projection_N=number_U[self.projection_N[is_kept_N]],
            targets_N=self.targets_N[is_kept_N],
            candidates_NK=None
            if self.candidates_NK is None
            else self.candidates_NK[is_kept_N],
            sequences=tuple(sequences),
        )

    def pick(self, arrays: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return the values [N] of the wanted tokens, from one array [T] per
        sequence."""
        picked = [np.empty(0, np.float32)]
        for sequence_index, wanted_N in self.sequences:
            picked.append(arrays[sequence_index][wanted_N])
        return np.concatenate(picked)

    def place(
        self, values_N: NDArray[np.float32], arrays: Sequence[NDArray[np.float32]]
    ) -> None:
        """Invert `pick`: write the values into one array [T] per sequence."""
        start = 0
        for sequence_index, wanted_N in self.sequences:
            end = start + len(wanted_N)
            arrays[sequence_index][wanted_N] = values_N[start:end]
            start = end


_NO_PLACES = np.empty(0, np.int64)
EMPTY_MICRO_BATCH = MicroBatch(
    tokens_P=np.zeros(1, np.int64),
    positions_P=np.zeros(1, np.int64),
    ends_P=np.ones(1, np.int64),
    sequences_P=np.zeros(1, np.int64),
    blocks=(AttentionBlock(start=0, end=1, prefix_K=_NO_PLACES, mask_QK=None),),
    project_U=_NO_PLACES,
    restricted_M=_NO_PLACES,
    allowed_MW=np.empty((0, 0), np.uint8),
    temperature_U=np.empty(0, np.float32),
    projection_N=_NO_PLACES,
    targets_N=_NO_PLACES,
    sequences=(),
)
"""One token and nothing wanted: with it a rank without data takes part in a step's
collectives."""
