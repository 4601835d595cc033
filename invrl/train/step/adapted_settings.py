"""Settings of the algorithm that adaptations change during a run.

Imported after `device.prepare()`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.policy_loss.axis_plugins import load_adaptations
from invrl.interfaces import Adaptation
from invrl.train.parallel.process_group import mean_over_ranks, sum_in_order
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.metrics import Max, Mean, Metric, Sum, merge


class AdaptedSettings:
    """The settings, and the state of each adaptation of them."""

    def __init__(self, algorithm: AlgorithmConfig, layout: ParallelLayout) -> None:
        self._algorithm = algorithm
        self._layout = layout
        self._adaptations = load_adaptations(algorithm)
        self.state: dict[str, Mapping[str, float]] = {}
        """State of each adaptation after the batches so far, by its name."""
        for name, adaptation in self._adaptations.items():
            self.state[name] = adaptation.start(algorithm)

    def settings(self) -> AlgorithmConfig:
        """Return the settings as the adaptations have changed them so far."""
        algorithm = self._algorithm
        for name, adaptation in self._adaptations.items():
            algorithm = adaptation.within(algorithm, self.state[name])
        return algorithm

    def adapt(
        self,
        after: Literal["batch", "optimizer_step"],
        metrics: Sequence[Mapping[str, Metric]],
        *,
        changes: bool,
    ) -> dict[str, Metric]:
        """Return the state of the adaptations that acted, and with `changes` adapt it
        to these metrics, on all ranks together."""
        acted: dict[str, Metric] = {}
        for name, adaptation in self._adaptations.items():
            if adaptation.after_each != after:
                continue
            state = self.state[name]
            # Max once a batch, because these are the same on every rank.
            kind = Max if after == "batch" else Mean
            acted |= {key: kind(value) for key, value in state.items()}
            if changes:
                measured = self._measured(adaptation, merge(metrics))
                if not any(map(math.isnan, measured.values())):
                    self.state[name] = adaptation(state, measured)
        return acted

    def _measured(
        self, adaptation: Adaptation, metrics: Mapping[str, Metric]
    ) -> dict[str, float]:
        """Return the metrics that the adaptation reads, over all ranks. A mean is NaN
        if no step was finite."""
        means = [metrics.get(name, Mean(0.0, 0)) for name in adaptation.means]
        totals = [mean.total for mean in means if isinstance(mean, Mean)]
        weights = [float(mean.weight) for mean in means if isinstance(mean, Mean)]
        measured: dict[str, float] = {}
        if means:
            over_ranks = mean_over_ranks(totals, weights)
            measured = dict(zip(adaptation.means, over_ranks, strict=True))
        layout = self._layout
        reporters = [layout.reporter(data) for data in range(layout.data)]
        for name in adaptation.sums:
            own = metrics.get(name, Sum(0.0)).value()
            measured[name] = sum_in_order(own, reporters)
        return measured
