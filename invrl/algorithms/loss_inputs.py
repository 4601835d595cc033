"""Inputs of a loss: the trained tokens of one micro-batch, their samples, and the
denominators of the whole mini-batch.

Axes: N tokens, R samples. A sample is a training sample: one trajectory of a rollout.
Invariant: all trained tokens of a sample are in one micro-batch, on every
context-parallel rank, so a sum over a sample is complete wherever it is computed. A
rollout may have several samples, in several micro-batches and on several ranks; numbers
of the whole rollout come with each of its samples."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from types import MappingProxyType

import torch
from torch import Tensor

from invrl.types.batches import TrainedCounts
from invrl.types.metrics import Max, Mean, Metric, Sum


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Denominators:
    """Counts of a mini-batch's trained parts, over all micro-batches and ranks. Parts
    without a trained token do not count."""

    tokens: float
    samples: float
    rollouts: float
    groups: float
    solved_tokens: float = 0.0
    """Tokens of samples whose number `solved` is 1."""

    @staticmethod
    def of(trained: TrainedCounts) -> "Denominators":
        return Denominators(
            tokens=trained.tokens,
            samples=trained.samples,
            rollouts=trained.rollouts,
            groups=trained.groups,
            solved_tokens=trained.solved_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """The samples of a micro-batch, and the sample of each token."""

    sample_N: Tensor
    """int64 [N]: index of the token's sample, 0 to R - 1, ascending."""
    tokens_R: Tensor
    """float32 [R]: trained tokens of the sample, at least 1."""
    rollout_tokens_R: Tensor
    """float32 [R]: trained tokens of the sample's rollout, over all its samples."""
    group_tokens_R: Tensor
    """float32 [R]: trained tokens of the sample's group."""

    @staticmethod
    def each_a_rollout(sample_N: Tensor) -> "Samples":
        """Return samples that are one rollout and one group each. Every sample in
        `sample_N` has a token."""
        num_samples = int(sample_N[-1]) + 1 if len(sample_N) else 0
        tokens_R = torch.bincount(sample_N, minlength=num_samples).float()
        return Samples(
            sample_N=sample_N,
            tokens_R=tokens_R,
            rollout_tokens_R=tokens_R,
            group_tokens_R=tokens_R,
        )

    def sum(self, values_N: Tensor) -> Tensor:
        """Sum over the tokens of each sample: [N] -> [R]."""
        zeros_R = torch.zeros_like(self.tokens_R, dtype=values_N.dtype)
        return zeros_R.index_add(0, self.sample_N, values_N)

    def mean(self, values_N: Tensor) -> Tensor:
        """Mean over the tokens of each sample: [N] -> [R]."""
        return self.sum(values_N) / self.tokens_R

    def spread(self, values_R: Tensor) -> Tensor:
        """Return the value of each token's sample: [R] -> [N]."""
        return values_R[self.sample_N]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopTokens:
    """The K likeliest tokens of the sampling policy at each trained token, the
    likeliest first: [N, K] each. Log-probs are as in `LossInputs`; minus infinity where
    there is no token."""

    current_NK: Tensor
    """Under the current policy, with gradient."""
    rollout_NK: Tensor
    """Under the sampling policy, as the engine returned them."""
    ids_NK: Tensor
    """int64; -1 where there is no token."""
    is_sampled_NK: Tensor
    """bool: the trained token itself, which may be missing here."""

    @property
    def is_token_NK(self) -> Tensor:
        """bool: whether there is a token."""
        return self.ids_NK >= 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """The trained tokens of one micro-batch, flat, sample by sample: float32 [N] each,
    N >= 0. Log-probs are in nats at the sampling temperature."""

    current_N: Tensor
    """Log-probs under the current policy, with gradient."""
    entropy_N: Tensor | None
    """Entropy of the current distribution in nats, with gradient."""
    samples: Samples
    denominators: Denominators
    old_N: Tensor | None
    """Log-probs under the old policy; None: they equal the current ones."""
    rollout_N: Tensor
    """Log-probs that the engine returned."""
    advantages_N: Tensor
    reference_N: Tensor | None
    """Log-probs under the frozen reference; None: the objective does not need them."""
    values_N: Tensor | None = None
    """The critic's values before the batch's first optimizer step; None: the objective
    needs no critic."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Further numbers of each token by name, from `TrainSample.columns`."""
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    """Further numbers of each sample by name, float32 [R] each, from
    `TrainSample.numbers`."""
    after_update_N: Tensor | None = None
    """Whether the old policy sampled a token in a turn that older weights began. Used
    only for metrics."""
    top: TopTokens | None = None
    router_shift_N: Tensor | None = None
    """Distance of the routers from the old policy where each token is predicted
    (`router_shift.py`), >= 0, without gradient. None: old is the current policy, or the
    objective does not need it."""

    def __post_init__(self) -> None:
        shapes: dict[str, tuple[int, ...]] = {
            "sample_N": tuple(self.samples.sample_N.shape)
        }
        for member in fields(self):
            value = getattr(self, member.name)
            if isinstance(value, Tensor):
                shapes[member.name] = tuple(value.shape)
        shapes |= {name: tuple(column.shape) for name, column in self.columns.items()}
        if self.top is not None:
            top_shapes = {
                tuple(getattr(self.top, member.name).shape)
                for member in fields(self.top)
            }
            if len(top_shapes) != 1:
                raise ValueError(
                    f"the likeliest tokens are not all of one shape [N, K]: {top_shapes}"
                )
            shapes["top"] = tuple(self.top.ids_NK.shape[:1])
        if len(set(shapes.values())) != 1 or self.current_N.dim() != 1:
            raise ValueError(f"loss inputs are not all of one shape [N]: {shapes}")
        if self.current_N.numel() > self.denominators.tokens:
            held = f"{self.current_N.numel()} tokens of one micro-batch"
            raise ValueError(f"denominator {self.denominators.tokens} for {held}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenWeights:
    """Factors of tokens."""

    log_weights_N: Tensor
    means: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] each: the metric of that name is the mean over the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleWeights:
    """Weights of the token losses of samples."""

    weights_R: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics: numbers that are added over micro-batches and ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutputs:
    loss: Tensor
    """Scalar to call backward on. Losses of all micro-batches and ranks are added."""
    metrics: Mapping[str, Metric]
    """Merged over micro-batches, ranks and steps."""


def token_metrics(
    means: Mapping[str, Tensor],
    maxima: Mapping[str, Tensor],
    sums: Mapping[str, Tensor] = MappingProxyType({}),
) -> Mapping[str, Metric]:
    """Return means and maxima over the tokens, [N] each, and sums.

    Maxima are of numbers >= 0, so the maximum of no tokens is 0. All numbers come to
    the host in one transfer, when one of them is first read: until then the host does
    not wait for a GPU.
    """
    return _TokenMetrics(means, maxima, sums)


class _TokenMetrics(Mapping[str, Metric]):
    def __init__(
        self,
        means: Mapping[str, Tensor],
        maxima: Mapping[str, Tensor],
        sums: Mapping[str, Tensor],
    ) -> None:
        self._makers: dict[str, Callable[[float], Metric]] = {}
        reduced: list[Tensor] = []
        for name, tensor in means.items():
            self._makers[name] = partial(Mean, weight=tensor.numel())
            reduced.append(tensor.detach().double().sum())
        for name, tensor in maxima.items():
            self._makers[name] = Max
            zero = tensor.new_zeros(1).double()
            reduced.append(torch.cat([tensor.detach().double(), zero]).max())
        for name, tensor in sums.items():
            self._makers[name] = Sum
            reduced.append(tensor.detach().double().sum())
        self._numbers = torch.stack(reduced)

    def __getitem__(self, name: str) -> Metric:
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    @cached_property
    def _metrics(self) -> dict[str, Metric]:
        numbers = self._numbers.tolist()
        return {
            name: make(number)
            for (name, make), number in zip(self._makers.items(), numbers, strict=True)
        }
