"""How the rewards of a batch become the advantages of its tokens: the settings, as the
buffer's pure code reads them."""

from dataclasses import dataclass, field, replace

from invrl.algorithms.config import AlgorithmConfig, RolloutUse, WhitenedOver
from invrl.algorithms.reward_shaping import Shaping


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRules:
    """The defaults are: rewards as they were given, compared within groups, every
    rollout trained."""

    shaping: Shaping = field(default_factory=Shaping)
    failed_rollouts: RolloutUse = "train"
    truncated_rollouts: RolloutUse = "train"
    over_batch: bool = False
    """Whether a reward is compared with those of the whole batch instead of its
    group's."""
    whitening: WhitenedOver = "none"
    std_floor: float = 0.0
    """Of the whitening."""
    discount: float = 1.0
    """Per turn, where rewards are added up over turns."""
    token_level: bool = False
    """Whether the trainer computes the advantages, from rewards that are placed on
    tokens."""
    reward_columns: tuple[str, ...] = ()
    solved_reward: float | None = None
    """Final reward from which a row has the number `solved` of 1, else 0; None: rows
    have no such number."""

    def use_of(self, *, failed: bool, truncated: bool) -> RolloutUse:
        """The more restrictive rule of those that apply to a rollout."""
        uses: set[RolloutUse] = {"train"}
        if failed:
            uses.add(self.failed_rollouts)
        if truncated:
            uses.add(self.truncated_rollouts)
        if "leave_out" in uses:
            return "leave_out"
        return "baseline" if "baseline" in uses else "train"


PLAIN_RULES = CreditRules()


def credit_rules(
    config: AlgorithmConfig, max_new_tokens: int, *, success_reward: float = 1.0
) -> CreditRules:
    """max_new_tokens: of one turn; the length of an overlong rollout where no other is
    set. success_reward: final reward from which a rollout counts as solved."""
    shaping = Shaping(length_penalty=config.length_penalty)
    if config.overlong is not None:
        shaping = replace(
            shaping,
            overlong_length=config.overlong.length or max_new_tokens,
            overlong_buffer=config.overlong.buffer,
            overlong_penalty=config.overlong.penalty,
        )
    return CreditRules(
        shaping=shaping,
        failed_rollouts=config.failed_rollouts,
        truncated_rollouts=config.truncated_rollouts,
        over_batch=config.advantage == "reinforce",
        whitening=config.whitened_over,
        std_floor=config.advantage_std_floor,
        discount=config.discount,
        token_level=config.token_level,
        reward_columns=config.reward_columns,
        solved_reward=success_reward if config.solved_nll_coef else None,
    )
