"""Ages of a batch's tokens, in weight versions."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAges:
    """Ages of the sampled tokens of a batch: how many versions older than the trainer's
    weights they are."""

    bound: int
    """`max_staleness`."""
    tokens: Mapping[int, int] = field(default_factory=dict)
    """Number of tokens by age, including those that lost their loss mask."""
    masked_tokens: int = 0
    """Tokens that are not trained because they are older than the bound."""
    masked_samples: int = 0
    """Samples that are not trained because all their tokens are."""

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens.values())

    @property
    def total_age(self) -> int:
        return sum(age * number for age, number in self.tokens.items())

    @property
    def num_beyond(self) -> int:
        """Tokens older than the bound."""
        return sum(number for age, number in self.tokens.items() if age > self.bound)

    def percentile(self, percent: int) -> int:
        """Return the smallest age that at least `percent` % of the tokens do not
        exceed; 0 without tokens."""
        num_younger = 0
        for age, number in sorted(self.tokens.items()):
            num_younger += number
            if 100 * num_younger >= percent * self.num_tokens:
                return age
        return 0
