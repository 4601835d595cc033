"""Reasons that a rollout has no reward or a group is not trained: one word for each,
and its meaning.

They are data: the ledger keeps them, metrics count them, and the console shows them.
"""

from enum import StrEnum


class FailureReason(StrEnum):
    """Reason that a rollout ended without a reward. Data, counted in the metrics."""

    EXCEPTION = "exception"
    """The user's code raised."""
    TIMEOUT = "timeout"
    """Rollout took longer than `rollout_timeout_s`, its session expired, or its lease
    was never used."""
    WORKER_DIED = "worker_died"
    """Worker process ended, or its event loop was blocked."""
    BAD_RETURN = "bad_return"
    """The rollout function returned neither a number nor a `RolloutResult`."""
    BAD_REWARD = "bad_reward"
    """The reward is missing, no number, not finite, or beyond `MAX_REWARD`."""
    EMPTY = "empty"
    """There is no token to train: no model call, or no reply that reached its
    client."""
    CONSTRAINED = "constrained"
    """A grammar forced every turn that reached the client; such turns are not
    trained."""
    ABORTED = "aborted"
    """The environment aborted the session."""
    ENGINE = "engine"
    """Our own endpoint could not answer: a 5xx, or no connection."""
    MEMORY = "memory"
    """Its worker held more than `workers.memory_gb`."""
    ENVIRONMENT_GONE = "environment_gone"
    """Its environment was silent for `session.idle_timeout_s`."""
    GROUP_DROPPED = "group_dropped"
    """Group was dropped while the rollout ran, so it was cancelled."""
    RUN_ENDED = "run_ended"
    """The run ended while it ran."""
    CONTEXT = "context"
    """A prompt did not fit the model's context, and the agent made no further call."""
    LIMIT = "limit"
    """Rollout used up the turns or the sampled tokens of its session, and the agent
    made no further call."""


class DropReason(StrEnum):
    """Reason that a rollout or a group was dropped instead of trained."""

    STALE = "stale"
    """A token of the group is more than `max_staleness` versions older than the
    trainer (`when_stale` "drop")."""
    ZERO_VARIANCE = "zero_variance"
    """All rewards are equal in every comparison of the group, so all advantages are
    0."""
    INCOMPLETE = "incomplete"
    """A rollout of the group failed and is not retried: it was the last attempt, or the
    rule for this failure is "drop"."""
    FILTERED = "filtered"
    """The group filter dropped the group for another reason than `ZERO_VARIANCE`, or
    raised; or the group has no token to train."""
    REPLACED = "replaced"
    """The attempt failed alone: the place is leased again for the next attempt."""
    TOKENS_LOST = "tokens_lost"
    """The group's turns are not in the store, or differ from what was written: a power
    loss, or a damaged file."""
    RUN_ENDED = "run_ended"
    """The run ended before the group was trained."""
    NOT_TRAINED = "not_trained"
    """The run has no trainer (`--debug-rollout-only`)."""
