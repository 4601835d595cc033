"""Packing: training rows become micro-batches in which a shared prefix is computed once.

Sorted row by row, sequences that share a prefix are neighbours, so one pass over the sorted rows lays
out a prefix trie: each row adds only the tokens after its longest common prefix with the row before
it. The rows that share their first token are a tree, and a token attends to its own ancestors only,
at its own depth: the result is what each row alone would give. Tokens after the last trained one,
and that one itself (it is only predicted), are not computed at all.

Memory follows two numbers, and both are bounded: packed tokens (activations), and rows of logits, each as
long as the vocabulary. A row of logits serves every trained token that comes after the same tokens at the
same temperature. A row that alone needs more rows of logits has them computed in parts. Pure numpy."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from invrl.types import TrainBatch, TrainSample

DENSE_TREE_TOKENS = 256
"""A branching tree of at most this many tokens is one attention call under a mask of tokens^2; a
larger one is a call per branch, over the branch's ancestors and itself."""
QUERY_CHUNK = 1024
"""Queries of one masked call: bounds the mask of a long branch."""
ATTENTION_TOKENS = 4096
"""Context length at which a token's attention costs as much as the rest of the model (balance only)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A sequence, and the tokens in it whose log-prob is wanted."""

    tokens_T: NDArray[np.int32]
    wanted_N: NDArray[np.int64]
    """Places of those tokens, ascending, each >= 1."""
    temperature: float
    kept_N: tuple[bytes | None, ...] = ()
    """The tokens among which each wanted one was chosen, as bits (the lowest first); None: the whole
    vocabulary. Empty: for all of them."""

    @property
    def kept_or_all_N(self) -> tuple[bytes | None, ...]:
        return self.kept_N or (None,) * len(self.wanted_N)

    @property
    def computed(self) -> int:
        """Tokens the model must see: those before the last wanted one."""
        return int(self.wanted_N[-1]) if len(self.wanted_N) else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBlock:
    """Queries [start, end) of a micro-batch attend to `prefix`, then to [start, end)."""

    start: int
    end: int
    prefix_K: NDArray[np.int64]
    """Places of the ancestors, root first."""
    mask_QK: NDArray[np.bool_] | None
    """[end - start, len(prefix) + end - start]; None: no prefix, and causal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """Rows of logits that are computed at once: U of a micro-batch's, and the N wanted tokens that they
    predict. Arrays are as in `MicroBatch`, with indices into these rows."""

    start: int
    """The first of the rows, among the micro-batch's; the others follow."""
    tokens_N: NDArray[np.int64]
    """Which of the micro-batch's wanted tokens they predict."""
    row_N: NDArray[np.int64]
    targets_N: NDArray[np.int64]
    temperature_U: NDArray[np.float32]
    masked_M: NDArray[np.int64]
    kept_MW: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """P packed tokens; N wanted ones, row by row in the order of `rows`; U rows of logits that predict
    them."""

    tokens_P: NDArray[np.int64]
    positions_P: NDArray[np.int64]
    blocks: tuple[AttentionBlock, ...]
    project_U: NDArray[np.int64]
    """Places of the packed tokens whose output is projected to logits, ascending; a place is there once per
    temperature and set of kept tokens."""
    temperature_U: NDArray[np.float32]
    masked_M: NDArray[np.int64]
    """Those of the U whose vocabulary is restricted."""
    kept_MW: NDArray[np.uint8]
    """The tokens that each of them keeps, as bits (the lowest first)."""
    projection_N: NDArray[np.int64]
    """Which of the U predicts each wanted token."""
    targets_N: NDArray[np.int64]
    rows: tuple[tuple[int, NDArray[np.int64]], ...]
    """(index of the row, its wanted places), for the values that go with the wanted tokens."""

    def projections(self, most: int) -> list[Projection]:
        """The rows of logits in parts of at most `most`, at least one part."""
        rows = len(self.project_U)
        if rows <= most:
            tokens = [np.arange(len(self.targets_N))]
        else:
            order_N = self.projection_N.argsort(kind="stable")
            bounds = np.searchsorted(self.projection_N[order_N], np.arange(most, rows, most))
            tokens = np.split(order_N, bounds)
        parts: list[Projection] = []
        for nth, tokens_N in enumerate(tokens):
            start = nth * most
            end = min(start + most, rows)
            first, last = np.searchsorted(self.masked_M, (start, end)).tolist()
            part = Projection(
                start=start,
                tokens_N=tokens_N,
                row_N=self.projection_N[tokens_N] - start,
                targets_N=self.targets_N[tokens_N],
                temperature_U=self.temperature_U[start:end],
                masked_M=self.masked_M[first:last] - start,
                kept_MW=self.kept_MW[first:last],
            )
            parts.append(part)
        return parts

    def pick(self, arrays: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Values [N] of the wanted tokens, from one array [T] per row."""
        picked = (arrays[index][wanted_N] for index, wanted_N in self.rows)
        return np.concatenate([np.empty(0, np.float32), *picked])

    def place(self, values_N: NDArray[np.float32], arrays: Sequence[NDArray[np.float32]]) -> None:
        """The inverse of `pick`: write the values into one array [T] per row."""
        at = 0
        for index, wanted_N in self.rows:
            arrays[index][wanted_N] = values_N[at : at + len(wanted_N)]
            at += len(wanted_N)


def rows_of(samples: Iterable[TrainSample]) -> list[Row]:
    """One row per sample; the trained tokens are wanted."""
    return [
        Row(tokens_T=one.tokens_T, wanted_N=np.flatnonzero(one.loss_mask_T), temperature=one.temperature)
        for one in samples
    ]


def pack(
    rows: Sequence[Row], *, max_tokens: int, max_projections: int, share_prefixes: bool
) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` packed tokens and `max_projections` rows of logits (a row that
    needs more stands alone), at least one: a rank without data takes part in the step with an empty one. Rows
    that want nothing are left out."""
    order = [index for index, row in enumerate(rows) if row.computed]
    if share_prefixes:
        order.sort(key=lambda index: _sort_key(rows[index].tokens_T))
    layout = _Layout(share_prefixes)
    packed: list[MicroBatch] = []
    for index in order:
        row = rows[index]
        fit = layout.fit(row)
        if layout.size and (fit.size > max_tokens or fit.projections > max_projections):
            packed.append(layout.micro_batch())
            layout = _Layout(share_prefixes)
            fit = layout.fit(row)
        layout.add(index, row, fit)
    packed.append(layout.micro_batch() if layout.size else _EMPTY)
    return packed


def _sort_key(tokens_T: NDArray[np.int32]) -> bytes:
    """Byte order is token order, as ids are not negative."""
    return tokens_T.astype(">u4").tobytes()


def common_prefix(a_T: NDArray[np.integer], b_T: NDArray[np.integer]) -> int:
    """Length of the longest common prefix."""
    length = min(len(a_T), len(b_T))
    differs = a_T[:length] != b_T[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


@dataclass(frozen=True, slots=True)
class _Branch:
    """A run of tokens [start, end) and the places of its ancestors."""

    start: int
    end: int
    ancestors_K: NDArray[np.int64]


_Kind = tuple[float, bytes | None]
"""Temperature and kept tokens: with the place they decide a row of logits."""


@dataclass(frozen=True, slots=True)
class _Fit:
    """What a row would add to a layout."""

    shared: int
    """Length of the prefix that it shares with the row before it."""
    places_T: NDArray[np.int64]
    """Of its computed tokens: those of the shared prefix, and new ones."""
    size: int
    """Packed tokens, with this row."""
    projections: int
    """Rows of logits, with this row."""


class _Projected:
    """Which rows of logits a layout has. A row's wanted places are distinct, and only those in its shared
    prefix can have been projected for a row before it, so most are counted without being looked up."""

    def __init__(self) -> None:
        self.count = 0
        self._places: dict[_Kind, NDArray[np.bool_]] = {}
        """Of each kind, whether a place is projected; as long as was needed so far."""

    def fresh(self, kind: _Kind, places_N: NDArray[np.int64]) -> int:
        """How many of these places are not projected so far."""
        projected_P = self._places.get(kind)
        if projected_P is None:
            return len(places_N)
        known_N = places_N[places_N < len(projected_P)]
        return len(places_N) - int(np.count_nonzero(projected_P[known_N]))

    def add(self, kind: _Kind, places_N: NDArray[np.int64], size: int) -> None:
        """`size`: every place is below it."""
        self.count += self.fresh(kind, places_N)
        projected_P = self._places.get(kind, np.empty(0, np.bool_))
        if len(projected_P) < size:
            longer_P = np.zeros(max(size, 2 * len(projected_P)), np.bool_)
            longer_P[: len(projected_P)] = projected_P
            projected_P = self._places[kind] = longer_P
        projected_P[places_N] = True


class _Layout:
    """A micro-batch under construction: rows come in sorted order."""

    def __init__(self, share_prefixes: bool) -> None:
        self.size = 0
        self._share = share_prefixes
        self._trees: list[list[_Branch]] = []
        self._last_T = np.empty(0, np.int32)
        self._last_places_T = np.empty(0, np.int64)
        self._rows: list[tuple[int, Row, _Fit]] = []
        """Index, row and place of each row."""
        self._projected = _Projected()

    def fit(self, row: Row) -> _Fit:
        """How this row would be laid out next."""
        tokens_T = row.tokens_T[: row.computed]
        shared = common_prefix(self._last_T, tokens_T) if self._share else 0
        size = self.size + len(tokens_T) - shared
        places_T = np.concatenate([self._last_places_T[:shared], np.arange(self.size, size)])
        fresh = sum(
            self._projected.fresh(kind, places_N) for kind, places_N in _wanted_by_kind(row, places_T)
        )
        return _Fit(shared=shared, places_T=places_T, size=size, projections=self._projected.count + fresh)

    def add(self, index: int, row: Row, fit: _Fit) -> None:
        """`fit`: what `fit(row)` has just returned."""
        if fit.size > self.size:
            if fit.shared == 0:
                self._trees.append([])
            self._trees[-1].append(_Branch(self.size, fit.size, fit.places_T[: fit.shared]))
            self._last_T = row.tokens_T[: row.computed]
            self._last_places_T = fit.places_T
            self.size = fit.size
        self._rows.append((index, row, fit))
        for kind, places_N in _wanted_by_kind(row, fit.places_T):
            self._projected.add(kind, places_N, self.size)

    def micro_batch(self) -> MicroBatch:
        rows = [row for _, row, _ in self._rows]
        added = [(row.tokens_T, fit.shared, row.computed) for _, row, fit in self._rows]
        wanted = [len(row.wanted_N) for row in rows]
        predict_from_N = np.concatenate([fit.places_T[row.wanted_N - 1] for _, row, fit in self._rows])
        temperatures = np.array([row.temperature for row in rows], np.float32)
        distinct_K, kind_R = np.unique(temperatures, return_inverse=True)
        kind_N = kind_R.astype(np.int64).repeat(wanted)
        masks, mask_N = _numbered_masks(rows)
        # The order of rows of logits: by place, then by temperature, then by mask.
        key_N = (predict_from_N * len(distinct_K) + kind_N) * len(masks) + mask_N
        _, first_U, projection_N = np.unique(key_N, return_index=True, return_inverse=True)
        kept_U = [] if masks == [None] else [masks[number] for number in mask_N[first_U].tolist()]
        masked = [(at, kept) for at, kept in enumerate(kept_U) if kept is not None]
        return MicroBatch(
            masked_M=np.array([at for at, _ in masked], np.int64),
            kept_MW=np.array([np.frombuffer(kept, np.uint8) for _, kept in masked], np.uint8),
            tokens_P=np.concatenate([tokens_T[start:end] for tokens_T, start, end in added], dtype=np.int64),
            positions_P=np.concatenate([np.arange(start, end) for _, start, end in added]),
            blocks=tuple(block for tree in self._trees for block in _blocks(tree)),
            project_U=predict_from_N[first_U],
            temperature_U=temperatures.repeat(wanted)[first_U],
            projection_N=projection_N,
            targets_N=np.concatenate([row.tokens_T[row.wanted_N] for row in rows], dtype=np.int64),
            rows=tuple((index, row.wanted_N) for index, row, _ in self._rows),
        )


def _wanted_by_kind(row: Row, places_T: NDArray[np.int64]) -> Iterator[tuple[_Kind, NDArray[np.int64]]]:
    """The places that predict a row's wanted tokens, by what is wanted of them."""
    places_N = places_T[row.wanted_N - 1]
    if not row.kept_N:
        yield (row.temperature, None), places_N
        return
    places_of: dict[bytes | None, list[int]] = {}
    for place, kept in zip(places_N.tolist(), row.kept_N, strict=True):
        places_of.setdefault(kept, []).append(place)
    for kept, places in places_of.items():
        yield (row.temperature, kept), np.array(places, np.int64)


def _numbered_masks(rows: Sequence[Row]) -> tuple[list[bytes | None], NDArray[np.int64]]:
    """The distinct masks of the wanted tokens, and of each token [N] the number of its own."""
    numbers: dict[bytes | None, int] = {}
    parts: list[NDArray[np.int64]] = []
    for row in rows:
        if row.kept_N:
            parts.append(np.array([numbers.setdefault(kept, len(numbers)) for kept in row.kept_N], np.int64))
        else:
            parts.append(np.full(len(row.wanted_N), numbers.setdefault(None, len(numbers)), np.int64))
    return list(numbers), np.concatenate(parts)


_NOWHERE = np.empty(0, np.int64)
_EMPTY = MicroBatch(
    tokens_P=np.zeros(1, np.int64),
    positions_P=np.zeros(1, np.int64),
    blocks=(AttentionBlock(start=0, end=1, prefix_K=_NOWHERE, mask_QK=None),),
    project_U=_NOWHERE,
    masked_M=_NOWHERE,
    kept_MW=np.empty((0, 0), np.uint8),
    temperature_U=np.empty(0, np.float32),
    projection_N=_NOWHERE,
    targets_N=_NOWHERE,
    rows=(),
)


def _blocks(tree: list[_Branch]) -> list[AttentionBlock]:
    """The attention calls of one tree."""
    start, end = tree[0].start, tree[-1].end
    if len(tree) > 1 and end - start <= DENSE_TREE_TOKENS:
        mask_QK = np.zeros((end - start, end - start), np.bool_)
        for branch in tree:
            rows = slice(branch.start - start, branch.end - start)
            mask_QK[rows, branch.ancestors_K - start] = True
            mask_QK[rows, rows] = np.tri(branch.end - branch.start, dtype=np.bool_)
        return [AttentionBlock(start=start, end=end, prefix_K=_NOWHERE, mask_QK=mask_QK)]
    blocks: list[AttentionBlock] = []
    for branch in tree:
        if not len(branch.ancestors_K):
            blocks.append(AttentionBlock(start=branch.start, end=branch.end, prefix_K=_NOWHERE, mask_QK=None))
            continue
        for at in range(branch.start, branch.end, QUERY_CHUNK):
            chunk = min(QUERY_CHUNK, branch.end - at)
            prefix_K = np.concatenate([branch.ancestors_K, np.arange(branch.start, at)])
            mask_QK = np.tri(chunk, len(prefix_K) + chunk, len(prefix_K), dtype=np.bool_)
            blocks.append(AttentionBlock(start=at, end=at + chunk, prefix_K=prefix_K, mask_QK=mask_QK))
    return blocks


Shard = tuple[TrainBatch, ...]
"""One rank's work: its share of each mini-batch (one optimizer step each), whose total is that of the whole
mini-batch over all ranks: its denominator."""


def mini_batches(batch: TrainBatch, steps: int) -> list[TrainBatch]:
    """Whole groups, in order, in at most `steps` parts of about equally many groups: with fewer groups
    than steps there are fewer parts. Parts in which nothing is trained are left out."""
    groups = list(dict.fromkeys(sample.group_id for sample in batch.samples))
    part_of = {group: at * min(steps, len(groups)) // len(groups) for at, group in enumerate(groups)}
    parts: list[list[int]] = [[] for _ in range(min(steps, len(groups)))]
    for index, sample in enumerate(batch.samples):
        parts[part_of[sample.group_id]].append(index)
    made = [_select(batch, indices) for indices in parts]
    totals = [sum(int(sample.loss_mask_T.sum()) for sample in part.samples) for part in made]
    return [replace(part, total_tokens=n) for part, n in zip(made, totals, strict=True) if n]


def _select(batch: TrainBatch, indices: Sequence[int]) -> TrainBatch:
    """These samples; the total stays the whole batch's."""
    samples = tuple(batch.samples[index] for index in indices)
    return replace(batch, samples=samples, advantages=tuple(batch.advantages[index] for index in indices))


def shard_batch(batch: TrainBatch, *, ranks: int, steps: int) -> list[Shard]:
    """Each rank's share of each mini-batch. What a mini-batch holds does not depend on `ranks`."""
    shares = [_shard(mini_batch, ranks) for mini_batch in mini_batches(batch, steps)]
    return [tuple(by_rank[rank] for by_rank in shares) for rank in range(ranks)]


def _shard(batch: TrainBatch, ranks: int) -> list[TrainBatch]:
    """Balance by cost. Groups stay whole where that balances as well as splitting them does: rows of
    a group share their prompt, and each part of it would compute the prompt again."""
    ways = [_assign(batch, ranks, parts) for parts in ((1, 2, 4, 8) if ranks > 1 else (1,))]
    best = min(ways, key=lambda loads: max(_cost(batch, indices) for indices in loads))
    return [_select(batch, indices) for indices in best]


def _assign(batch: TrainBatch, ranks: int, parts: int) -> list[list[int]]:
    """Split each group's rollouts into `parts`, then give the costliest part to the least loaded rank.
    The rows of one rollout stay together."""
    groups: dict[str, dict[str, list[int]]] = {}
    for index, sample in enumerate(batch.samples):
        groups.setdefault(sample.group_id, {}).setdefault(sample.rollout_id, []).append(index)
    items: list[list[int]] = []
    for rollouts in groups.values():
        rows = list(rollouts.values())
        size = -(-len(rows) // parts)
        items += [list(chain(*rows[at : at + size])) for at in range(0, len(rows), size)]
    costs = [_cost(batch, item) for item in items]
    loads: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for at in sorted(range(len(items)), key=lambda at: -costs[at]):
        rank = totals.index(min(totals))
        loads[rank] += items[at]
        totals[rank] += costs[at]
    return [sorted(load) for load in loads]


def _cost(batch: TrainBatch, indices: Sequence[int]) -> float:
    """Work of computing these samples together, in tokens: shared prefixes once, attention by depth."""
    total, last_T = 0.0, np.empty(0, np.int32)
    rows = [row for row in rows_of(batch.samples[index] for index in indices) if row.computed]
    for row in sorted(rows, key=lambda row: _sort_key(row.tokens_T)):
        tokens_T = row.tokens_T[: row.computed]
        shared, length = common_prefix(last_T, tokens_T), len(tokens_T)
        total += (length - shared) * (1 + (length + shared) / 2 / ATTENTION_TOKENS)
        last_T = tokens_T
    return total
