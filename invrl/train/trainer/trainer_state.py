"""The trainer's own state on disk: a Megatron distributed checkpoint of model,
optimizer and schedule, and each rank's random state.

What a run's whole checkpoint consists of is in `run/checkpoints/checkpoints.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from invrl.errors import TrainError
from invrl.train.adapters.trained_adapter import TrainedAdapter, check_record
from invrl.train.critic.critic_state import CriticState, critic_folder
from invrl.train.model.policy_model import PolicyModel
from invrl.train.model.reference import SAVED_PREFIX, FrozenReference
from invrl.train.ranks.checkpoint_writer import StatePlaceholders
from invrl.train.ranks.saved_state import (
    SavedState,
    Trained,
    load_random_state,
    sharding_metadata,
)
from invrl.train.step.train_step import TrainStep


class TrainerState(SavedState):
    """Saves and loads one rank's share of the model and its optimizer, and its random
    state."""

    def __init__(
        self,
        chunks: Sequence[PolicyModel],
        optimizer: ChainedOptimizer,
        schedule: OptimizerParamScheduler,
        step: TrainStep,
        adapter: TrainedAdapter | None = None,
    ) -> None:
        """`step` has the adapted settings, a reference that may move, and the critic,
        if there is one. `adapter` is what is trained instead of the model."""
        self._step = step
        self._adapter = adapter
        self._moving_reference = None
        if step.algorithm.reference_moves and isinstance(
            step.reference, FrozenReference
        ):
            self._moving_reference = step.reference
        self._policy = Trained(chunks, optimizer, schedule)
        optimizers = [optimizer]
        placeholders = StatePlaceholders()
        self._critic = None
        if step.critic is not None:
            self._critic = CriticState(step.critic, placeholders)
            optimizers.append(step.critic.optimizer)
        super().__init__(optimizers, placeholders)

    def load(self, path: str) -> None:
        """Load a checkpoint. Called on all ranks together. Raises TrainError if there
        is none."""
        if not dist_checkpointing.check_is_distributed_checkpoint(path):
            raise TrainError(f"{path} holds no checkpoint")
        common = dist_checkpointing.load_common_state_dict(path)
        check_record(path, common.get("adapter"), self._adapter)
        if self._critic is not None:
            critic_folder(path)
        if self._moving_reference is not None and not _has_reference(path):
            raise TrainError(
                f"{path} holds no reference: the run that saved it had one that does not move. Leave out "
                "--reference.ema and --reference.reset-steps, or begin a new run with --model-path"
            )
        sharded = self._of_policy(is_loading=True)
        # loading takes the parameters out of `sharded`
        of_reference: dict[str, dict[str, torch.Tensor]] = {}
        if self._moving_reference is not None:
            for name in self._policy.chunk_names:
                of_reference[name] = self._moving_reference.saved(sharded[name])
        state = self._read(sharded, path)
        self._policy.load(state)
        adapted = self._step.adapted.state
        for name, saved in state["adapted"].items():
            # A checkpoint may lack some, or have others: those stay as they start.
            if name in adapted:
                adapted[name] = {**adapted[name], **saved}
        for name, weights in of_reference.items():
            for key, weight in weights.items():
                weight.copy_(state[f"{SAVED_PREFIX}{name}"][key])
        if self._critic is not None:
            self._critic.load(path)
        load_random_state(path)

    def sharded(self, *, is_loading: bool) -> dict[str, Any]:
        state = self._of_policy(is_loading=is_loading)
        if self._critic is not None:
            state |= self._critic.sharded(is_loading=is_loading)
        return state

    def _of_policy(self, *, is_loading: bool) -> dict[str, Any]:
        state = self._policy.sharded_state(sharding_metadata(), is_loading=is_loading)
        if self._moving_reference is not None:
            for name in self._policy.chunk_names:
                state[f"{SAVED_PREFIX}{name}"] = self._moving_reference.sharded(
                    state[name]
                )
        state["adapted"] = dict(self._step.adapted.state)
        if self._adapter is not None:
            state["adapter"] = self._adapter.record
        return state


def _has_reference(path: str) -> bool:
    return any(
        name.startswith(SAVED_PREFIX)
        for name in dist_checkpointing.load_tensors_metadata(path)
    )
