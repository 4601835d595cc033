"""Admission: bounds the number of groups under way, and so their staleness."""

from invrl.buffer.config import BufferConfig


def admission_limit(config: BufferConfig, batch_size: int) -> int:
    """Maximum number of groups under way: in flight, ready, or taken while the new
    version is not there yet. `batch_size` is in groups.

    Groups are taken oldest first. So with at most (max_staleness + 1) batches under
    way, the last of them is taken at most `max_staleness` versions after it was leased.
    Over-sampled groups are added on top: they replace filtered groups, and surplus ones
    age until they are dropped.
    """
    return (config.max_staleness + 1) * batch_size + config.over_sampling_groups
