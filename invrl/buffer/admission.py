"""How many groups may be under way at once: the bound on staleness, where work is
admitted."""

from invrl.buffer.config import BufferConfig


def admission_limit(config: BufferConfig, batch_size: int) -> int:
    """Groups that may be under way at once: in flight, ready, or taken while the new
    version is not there yet. `batch_size`: groups in a batch.

    Groups are taken oldest first. So with at most (max_staleness + 1) batches under
    way, the last of them is taken at most `max_staleness` versions after it was leased.
    Over-sampled groups come in addition: they replace the groups that are filtered out,
    and those that are left over age until they are dropped."""
    return (config.max_staleness + 1) * batch_size + config.over_sampling_groups
