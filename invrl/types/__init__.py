"""The vocabulary of the package: one frozen type per stage of a sample's life.

    WeightVersion -> Task -> GroupLease -> Session -> Turn -> Trajectory -> Rollout | FailedRollout
        -> Group -> TakenBatch -> TrainSample -> TrainBatch -> WeightUpdate

    weights.py       WeightVersion, TensorSpec, WeightUpdate
    tasks.py         Task
    leases.py        Place, GroupLease
    sessions.py      Session, Sampling, RolloutIdentity, Reward
    turns.py         Turn, Trajectory
    rollouts.py      RolloutSummary, Rollout, FailedRollout
    groups.py        Group, GroupOutcome, TaskHistory
    batches.py       TakenBatch, TrainSample, TrainBatch

Axes in names: `_G` members of a group, `_T` tokens of a sequence, `_B` packed rows.
Token ids and versions are int32, log-probs and advantages float32. Constructors check
lengths, so a value that exists is consistent. Every package imports these modules; they
import each other and nothing else of ours. The names below are those that programs of
users import from here; our own code imports each from its module.
"""

from invrl.types.groups import Group, GroupOutcome, TaskHistory
from invrl.types.rollouts import RolloutSummary
from invrl.types.tasks import Json, Task

__all__ = ["Group", "GroupOutcome", "Json", "RolloutSummary", "Task", "TaskHistory"]
