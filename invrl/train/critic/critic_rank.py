"""A rank of a critic on separate ranks: its process group, its share of the critic, its
weights.

The policy's ranks are in another group, so the two never meet in a collective: values
and returns go through the driver. As in `trainer/train_rank.py`, every rank of the
critic makes the same calls in the same order, and modules that import Megatron are
imported after `device.prepare()`.
"""

import math
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from invrl.families.hf_config import read_hf_config
from invrl.interfaces import StepResult
from invrl.train.batches.grammar_masks import GrammarMasks
from invrl.train.batches.sharding import Shard
from invrl.train.cost.model_size import ComputeCost
from invrl.train.critic.critic_values import CriticValues, ValuesOfShard
from invrl.train.model.nonfinite_steps import NonfiniteSteps
from invrl.train.rank_settings import RankSettings
from invrl.train.ranks.saving_rank import SavingRank
from invrl.train.runtime import device
from invrl.train.runtime.megatron_args import parse_megatron_options
from invrl.types.metrics import Max, Metric, merge

if TYPE_CHECKING:
    from invrl.train.model.pipeline_schedule import Packed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Valued:
    """A batch between its values and its steps."""

    shard: Shard
    packed: list["Packed"]
    values: ValuesOfShard
    seconds: float


class CriticRank(SavingRank):
    """Raises the errors of `TrainRank`. It saves into the critic's own folder, and
    loads from the whole checkpoint, whose critic may have been on other ranks, its own
    or the policy's."""

    def __init__(
        self, settings: RankSettings, port: int, listener: socket.socket | None
    ) -> None:
        """See `TrainRank`; rank 0 is the critic's first."""
        config = read_hf_config(settings.model_path)
        settings.layout.check(config)
        device.prepare()
        if settings.train.deterministic:
            device.make_deterministic()
        from invrl.train.critic.critic import make_critic
        from invrl.train.critic.critic_state import CriticState
        from invrl.train.parallel.process_group import join_process_group
        from invrl.train.ranks.checkpoint_writer import StatePlaceholders

        join_process_group(settings, port, listener)
        self._settings = settings
        self._masks = GrammarMasks(settings.model_path, config.vocab_size)
        self._cost = ComputeCost.of_model(Path(settings.model_path))
        self._critic = make_critic(
            settings, config, parse_megatron_options(settings.megatron)
        )
        self._nonfinite = NonfiniteSteps(settings.train.max_nonfinite_steps)
        self._valued: _Valued | None = None
        state = CriticState(self._critic, StatePlaceholders())
        super().__init__(state, state.load_alone)

    def values(self, shard: Shard) -> CriticValues:
        """Return the values of a batch to train; `learn` follows. All 0 on a pipeline
        stage that is not the last."""
        from invrl.train.model.pipeline_schedule import pack_sequences

        started = time.monotonic()
        settings = self._settings
        packed = [
            pack_sequences(
                self._masks.sequences(mini_batch.samples),
                train=settings.train,
                layout=settings.layout,
                cost=self._cost,
            )
            for mini_batch in shard
        ]
        values = self._critic.values(packed) if packed else []
        seconds = time.monotonic() - started
        self._valued = _Valued(
            shard=shard, packed=packed, values=values, seconds=seconds
        )
        return CriticValues(values=values, learns_alone=self._critic.learns_alone)

    def learn(self, returns: ValuesOfShard) -> StepResult:
        """Make one optimizer step per mini-batch of the batch that `values` had. Steps
        that are not finite are counted like the policy's."""
        from invrl.train.critic.critic import Targets
        from invrl.train.parallel.process_group import max_over_ranks

        assert self._valued is not None, "values comes first"
        valued = self._valued
        self._valued = None
        started = time.monotonic()
        metrics: dict[str, Metric] = {}
        steps = 0
        nonfinite_steps = 0
        for mini_batch, packed, old, returns_of_step in zip(
            valued.shard, valued.packed, valued.values, returns, strict=True
        ):
            targets = Targets(
                old=old, returns=returns_of_step, tokens=mini_batch.trained.tokens
            )
            step = self._critic.step(packed, targets)
            if not math.isfinite(step.grad_norm):
                nonfinite_steps += 1
                self._nonfinite.count(mini_batch, step.grad_norm, step.bad_losses)
                continue
            self._nonfinite.end()
            steps += step.grad_norm > 0.0
            metrics = merge([metrics, step.metrics])
        self._critic.batches += 1
        metrics["critic_steps"] = Max(steps)
        metrics["nonfinite_steps"] = Max(nonfinite_steps)
        metrics["critic_peak_memory_gb"] = Max(
            max_over_ranks(device.peak_memory()) / 1e9
        )
        return StepResult(
            optimizer_steps=steps,
            nonfinite_steps=nonfinite_steps,
            metrics=metrics,
            seconds={"values": valued.seconds, "critic": time.monotonic() - started},
        )
