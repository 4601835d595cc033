"""Low-rank adapters of the policy's projections: their computation in every layout of
ranks, and their PEFT folders."""
