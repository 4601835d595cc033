"""The critic's share of a checkpoint, in the policy's own folder or in one below it.

Invariant: both hold the same under the same names, so a critic that shared the policy's
ranks continues on separate ranks, and vice versa.
"""

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

from invrl.errors import TrainError
from invrl.train.critic.critic import Critic
from invrl.train.rank_settings import CRITIC_FOLDER
from invrl.train.ranks.checkpoint_writer import StatePlaceholders
from invrl.train.ranks.saved_state import (
    SavedState,
    Trained,
    load_random_state,
    sharding_metadata,
)


class CriticState(SavedState):
    """Saves and loads one rank's share of the critic and its optimizer."""

    def __init__(self, critic: Critic, placeholders: StatePlaceholders) -> None:
        super().__init__([critic.optimizer], placeholders)
        self._critic = critic
        self._trained = Trained(critic.models, critic.optimizer, critic.schedule)

    def sharded(self, *, is_loading: bool) -> dict[str, Any]:
        """Return the critic's part of a checkpoint."""
        state = self._trained.sharded_state(sharding_metadata(), is_loading=is_loading)
        add_prefix_for_sharding(state, "critic.")
        return {"critic": state, "critic_batches": self._critic.batches}

    def load(self, path: str) -> None:
        """Load the critic from the whole checkpoint at `path`. All ranks of the critic
        call it together. Raises TrainError if there is no critic in it."""
        folder = critic_folder(path)
        state = self._read(self.sharded(is_loading=True), folder)
        self._trained.load(state["critic"])
        self._critic.batches = state["critic_batches"]

    def load_alone(self, path: str) -> None:
        """Load like `load`, with the random state of a rank that has only the
        critic."""
        self.load(path)
        load_random_state(str(Path(path) / CRITIC_FOLDER))


def critic_folder(path: str) -> str:
    """Return the folder of a checkpoint that holds its critic. Raises TrainError if
    there is no checkpoint, or no critic in it."""
    below = str(Path(path) / CRITIC_FOLDER)
    if dist_checkpointing.check_is_distributed_checkpoint(below):
        return below
    if not dist_checkpointing.check_is_distributed_checkpoint(path):
        raise TrainError(f"{path} holds no checkpoint")
    if "critic_batches" not in dist_checkpointing.load_common_state_dict(path):
        raise TrainError(
            f"{path} holds no critic: the run that saved it had another advantage. Resume with that one, "
            "or begin a new run with --model-path"
        )
    return path
