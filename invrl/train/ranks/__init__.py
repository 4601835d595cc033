"""Parts that ranks of the policy and of a critic share: Ray actor, calls,
checkpoint."""
