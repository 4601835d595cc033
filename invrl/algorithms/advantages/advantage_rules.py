"""Rules that turn the rewards of a batch into the advantages of its tokens: the
settings, as the buffer's pure code reads them."""

from dataclasses import dataclass, field, replace

from invrl.algorithms.advantages.reward_shaping import Shaping
from invrl.algorithms.config import AlgorithmConfig, RolloutUse


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageRules:
    """Credit assignment. Defaults: rewards as given, compared within groups, every
    rollout trained."""

    algorithm: AlgorithmConfig = field(
        default_factory=lambda: AlgorithmConfig.model_validate({})
    )
    shaping: Shaping = field(default_factory=Shaping)
    solved_reward: float | None = None
    """Final reward from which a sample's number `solved` is 1, else 0; None: samples
    have no such number."""

    @property
    def over_batch(self) -> bool:
        """Whether a reward is compared with those of the whole batch instead of its
        group."""
        return self.algorithm.advantage == "reinforce"

    def rollout_use(self, *, failed: bool, truncated: bool) -> RolloutUse:
        """Return the most restrictive rule that applies to a rollout."""
        uses: set[RolloutUse] = {"train"}
        if failed:
            uses.add(self.algorithm.failed_rollouts)
        if truncated:
            uses.add(self.algorithm.truncated_rollouts)
        if "leave_out" in uses:
            return "leave_out"
        return "baseline" if "baseline" in uses else "train"


PLAIN_RULES = AdvantageRules()


def advantage_rules(
    config: AlgorithmConfig, max_new_tokens: int, *, success_reward: float = 1.0
) -> AdvantageRules:
    """Build the rules from the settings. `max_new_tokens` of one turn is the default
    length of an overlong rollout; `success_reward` is the final reward from which a
    rollout counts as solved."""
    shaping = Shaping(length_penalty=config.length_penalty)
    if config.overlong is not None:
        shaping = replace(
            shaping,
            overlong_length=config.overlong.length or max_new_tokens,
            overlong_buffer=config.overlong.buffer,
            overlong_penalty=config.overlong.penalty,
        )
    return AdvantageRules(
        algorithm=config,
        shaping=shaping,
        solved_reward=success_reward if config.solved_nll_coef else None,
    )
