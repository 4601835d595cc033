"""The plug points that users implement, and the interfaces between our own parts.

Everything here is a Protocol, or a value that a Protocol takes or returns.
`user_code/plugins.py` loads user code by `package.module:name` and checks its signature
against these Protocols at start-up. The loop, the dispatcher and the weight transaction
know their neighbours only through these interfaces.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from invrl.types.batches import TakenBatch, TrainBatch, TrainedCounts
from invrl.types.file_entry import FileEntries
from invrl.types.fleet import FleetSnapshot, LiveSession, TurnPlan
from invrl.types.groups import DroppedGroup, Group, GroupOutcome, TaskHistory
from invrl.types.leases import GroupLease
from invrl.types.metrics import Metric
from invrl.types.rollouts import Outcome
from invrl.types.sessions import MAX_NAME_LENGTH, MAX_REWARD_COMPONENTS
from invrl.types.tasks import Json, Task
from invrl.types.weights import TensorSpec, WeightVersion

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from torch import Tensor

    from invrl.algorithms.config import AlgorithmConfig
    from invrl.algorithms.loss_inputs import (
        LossInputs,
        LossOutputs,
        SampleWeights,
        TokenWeights,
    )
    from invrl.algorithms.policy_loss.policy_losses import PolicyLossInputs, TokenLosses
    from invrl.run.settings.config import Config

# ----------------------------------------------------------------- what users write


class Endpoint(Protocol):
    """An OpenAI and Anthropic endpoint for one rollout function: one session."""

    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...
    @property
    def model(self) -> str: ...
    def openai(self) -> AsyncOpenAI:
        """Return a client whose retries and deadline are set for this session."""
        ...

    def anthropic(self) -> Any:
        """Return an `anthropic.AsyncAnthropic`, set up in the same way. Raises
        ImportError if that package is missing."""
        ...

    async def reward(
        self,
        value: float,
        *,
        turn: str = "",
        branch: str = "",
        components: Mapping[str, float] | None = None,
    ) -> None:
        """Reward one turn, the trajectories through a turn, or, with neither, this
        session: a child's own reward. (The reward that the rollout function returns
        counts for its own session.) A turn is named by the `id` of its reply, from any
        client. The last reward counts. Raises SessionError, DeadlineError."""
        ...

    async def open_child(self) -> Endpoint:
        """Open a session for a sub-agent. Its conversation is separate, and it inherits
        this session's reward unless it is rewarded itself. It ends with this session.
        Raises SessionError, DeadlineError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """What a rollout function may return instead of a bare float.

    Numbers are of columns that `--session.extra-columns` declares. A turn is named by
    the `id` of its answer, of any client.

    Raises ValueError for components that the gateway would refuse: too many, or with
    names that are too long.
    """

    reward: float | None = None
    """Final reward. None only if a reward function is set."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, for the metrics."""
    output: str = ""
    """Input of the reward function, for example the final answer."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the rollout by column."""
    turn_numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Numbers of turns by reply id and column."""
    token_numbers: Mapping[
        str, Mapping[str, Sequence[float] | NDArray[np.floating]]
    ] = field(default_factory=dict)
    """Numbers of sampled tokens by reply id and column: one for each token that the
    turn sampled, in order. The reply's usage counts them."""

    def __post_init__(self) -> None:
        if not isinstance(self.components, Mapping):
            return  # refused later, together with other wrong types
        fault = components_fault(self.components)
        if fault:
            raise ValueError(fault)


def components_fault(components: Mapping[str, float]) -> str:
    """Describe what is wrong with the number or the names of a reward's components; ""
    if nothing is."""
    if len(components) > MAX_REWARD_COMPONENTS:
        num_entries = len(components)
        return f"RolloutResult.components has {num_entries} entries; at most {MAX_REWARD_COMPONENTS} are allowed"
    for name in components:
        if isinstance(name, str) and len(name) > MAX_NAME_LENGTH:
            return (
                f"RolloutResult.components has a name of {len(name)} characters, {name[:40]!r}...; "
                f"at most {MAX_NAME_LENGTH} are allowed"
            )
    return ""


class RolloutFn(Protocol):
    """Runs one task. Async, or sync (a sync function runs in a thread)."""

    def __call__(
        self, task: Task, endpoint: Endpoint
    ) -> float | RolloutResult | Awaitable[float | RolloutResult]: ...


class GroupRolloutFn(Protocol):
    """Runs a whole group, for relative judging. The function has the attribute `group =
    True`. Returns one result per endpoint, in order."""

    def __call__(
        self, task: Task, endpoints: Sequence[Endpoint]
    ) -> (
        Sequence[float | RolloutResult] | Awaitable[Sequence[float | RolloutResult]]
    ): ...


class RewardFn(Protocol):
    """The reward of a finished rollout. It replaces any reward that the rollout
    function returned."""

    def __call__(
        self, task: Task, result: RolloutResult
    ) -> float | Awaitable[float]: ...


class TaskSource(Protocol):
    """Yields the tasks of a split; the same tasks for the same seed. "train" yields as
    long as the run asks. "eval" is finite and shares no task with "train".

    The result for "train" may have more methods than `__next__`: that of
    `OutcomeRecorder`, those of `StateKeeper`, or both. It then decides what comes next,
    and its end is final; any other source that ends is called again.
    """

    def __call__(self, split: str, seed: int) -> Iterator[Task]: ...


@runtime_checkable
class OutcomeRecorder(Protocol):
    """Tasks that are informed of their groups' outcomes, to pick the next ones."""

    def record(self, outcome: GroupOutcome) -> None:
        """Record the outcome of a leased group, once, as soon as it is complete or
        dropped. Groups that are open when the run ends have none. Runs in the buffer's
        process and must be quick. An exception is shown and counted, and the run
        continues without that outcome."""
        ...


@runtime_checkable
class StateKeeper(Protocol):
    """Tasks that continue from their state after a resume. Tasks with neither these
    methods nor `record` need none: a resume reads the source again up to where it
    was."""

    def state(self) -> Json:
        """Return everything that decides what comes next, as JSON that survives a round
        trip, at most 64 MiB. Called for every checkpoint."""
        ...

    def restore(self, state: Json) -> None:
        """Restore what `state` returned. Called first on a new object of the source."""
        ...


class GroupFilter(Protocol):
    """Keeps a complete group (returns None) or drops it (returns the reason, a short
    snake_case word)."""

    def __call__(self, group: Group) -> str | None: ...


class HistoryGroupFilter(Protocol):
    """A group filter with a parameter `history`: the earlier groups of the same task,
    in this run and, after a resume, in the resumed one."""

    def __call__(self, group: Group, *, history: TaskHistory) -> str | None: ...


class GatePolicy(Protocol):
    """Decides, from the load of the engines and all live sessions, which waiting turns
    are held. Returns plans by session id; a waiting session without one passes. Called
    in the gateway's event loop up to 50 times a second, so it must be quick."""

    def __call__(
        self, fleet: FleetSnapshot, sessions: Sequence[LiveSession]
    ) -> Mapping[str, TurnPlan]: ...


class AdvantageFn(Protocol):
    """Advantages of rewards that are compared with each other; both float64 [G]. For
    final rewards G is the group's size; for rewards of turns, trajectories and children
    it is any number >= 1."""

    def __call__(
        self, rewards_G: NDArray[np.float64], *, eps: float
    ) -> NDArray[np.float64]: ...


class GroupAdvantageFn(Protocol):
    """An `AdvantageFn` with a parameter named `group`, which has data of the rollouts:
    lengths, reward components, numbers of extra columns. `rewards_G[i]` is then the
    final reward of `group.rollouts_G[i]`. For rewards of turns, trajectories and
    children, which are not one per rollout, `group` is None."""

    def __call__(
        self, rewards_G: NDArray[np.float64], *, eps: float, group: Group | None = None
    ) -> NDArray[np.float64]: ...


class PolicyLoss(Protocol):
    """The loss of each token from its ratio current/old, which carries the gradient,
    and its advantage; all torch float32 [N]. Off-policy correction, KL and aggregation
    are applied to the result. A function with a keyword `inputs=None` also gets the
    LossInputs: log-probs of all policies, rows, columns and numbers."""

    def __call__(
        self,
        ratio_N: Tensor,
        advantages_N: Tensor,
        *,
        eps_clip_low: float,
        eps_clip_high: float,
    ) -> Tensor: ...


class MeasuredPolicyLoss(Protocol):
    """A policy loss of one argument, as the built-in ones: it gets all inputs and
    settings, and returns numbers for the metrics with the losses. The attribute `needs`
    (`algorithms.objectives.Needs`) says what it reads besides."""

    def __call__(self, of: PolicyLossInputs) -> TokenLosses: ...


class OldPolicy(Protocol):
    """The old policy, in which a ratio current/old begins: log-probs [N], without
    gradient. May have the attribute `needs`."""

    def __call__(self, inputs: LossInputs) -> Tensor: ...


class RatioWeight(Protocol):
    """A factor of each token's ratio current/old, before it is clipped or averaged over
    a row. May have the attribute `needs`."""

    def __call__(self, inputs: LossInputs) -> TokenWeights: ...


@runtime_checkable
class SampleWeight(Protocol):
    """A factor of the token losses of each row, after the aggregation."""

    def numbers(self, trained: TrainedCounts) -> Mapping[str, Mapping[str, float]]:
        """Return numbers of the rollouts of a mini-batch by rollout id and name, equal
        on every rank. They are then in `inputs.numbers` of the rollout's rows."""
        ...

    def __call__(
        self, inputs: LossInputs, weight_R: Tensor, losses_N: Tensor
    ) -> SampleWeights:
        """Return the weights, given those of the aggregation and the losses [N]. Not
        called without a row."""
        ...


@runtime_checkable
class Adaptation(Protocol):
    """Changes settings of the algorithm during a run, from what was measured. Its state
    is numbers: they are saved in checkpoints, and are metrics of the step under their
    names. All calls are equal on every rank."""

    after_each: Literal["batch", "optimizer_step"]
    means: Sequence[str]
    """Names of the metrics that it reads as means over tokens."""
    sums: Sequence[str]
    """Names of those that it reads as sums."""

    def start(self, algorithm: AlgorithmConfig) -> Mapping[str, float]:
        """Return the state at the start of a run."""
        ...

    def __call__(
        self, state: Mapping[str, float], measured: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Return the state after a batch, or an optimizer step, with these metrics.
        Not called after one without a finite loss."""
        ...

    def within(
        self, algorithm: AlgorithmConfig, state: Mapping[str, float]
    ) -> AlgorithmConfig:
        """Return the settings with the state in them."""
        ...


class Objective(Protocol):
    """The loss that a training step minimizes, from the trained tokens of one
    micro-batch. It is a scalar that depends on `inputs.current_N` or
    `inputs.entropy_N`; losses of all micro-batches and ranks are added, so a mean is
    over `inputs.denominators`. The attribute `needs` (`algorithms.objectives.Needs`)
    says which log-probs it also reads."""

    def __call__(self, inputs: LossInputs) -> LossOutputs: ...


@runtime_checkable
class ChecksSettings(Protocol):
    """User code of the algorithm that contradicts other settings."""

    def check(self, config: Config) -> None:
        """Raise ConfigError at a contradiction, before anything starts."""
        ...


# ----------------------------------------------------------------- seams of the loop


class Buffer(Protocol):
    """The buffer as other processes hold it (`buffer/process/buffer_handle.py`). Its
    state machine is `buffer/groups/group_buffer.py`."""

    async def lease(self) -> GroupLease | None:
        """Return work to run now; None while the staleness bound or the task source
        admits no more."""

    async def record(self, outcome: Outcome) -> None:
        """Record an outcome. Idempotent: the same one may arrive again after a
        crash."""

    async def unwanted(self) -> Sequence[DroppedGroup]:
        """Return groups that were dropped while their rollouts ran, so that those can
        be cancelled.

        Each group is returned once. Waits for the first one and returns an empty
        sequence if none comes for a while. A returned group is in no lease that is
        requested afterwards.
        """
        ...

    async def take(self) -> TakenBatch:
        """Return the next batch of whole groups within the staleness bound. Raises
        DeadlineError, which names what is missing, and FilteredOutError if the group
        filter drops everything."""
        ...

    async def trained(self, batch_id: int) -> None: ...

    async def snapshot(self, trained: WeightVersion) -> bytes:
        """Return the buffer's state for a checkpoint, between `trained` and `advance`.
        `trained` is the version that the trainer holds."""
        ...

    async def advance(self, version: WeightVersion) -> None:
        """Report that the trainer holds `version` and that its canary has passed:
        tokens sampled under it count, and admission and staleness are counted against
        it. In a run without a trainer the version stays the same, and the call reports
        that the batch was seen."""

    async def metrics(self) -> Mapping[str, Metric]:
        """Return events since the last call by drop reason, and the number of groups
        and rollouts in each state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRecord:
    """Data that a step trained one sample with: float32 [N], for each trained token in
    order."""

    advantages_N: NDArray[np.float32]
    logprobs_N: NDArray[np.float32]
    """The trainer's, in nats: under the old policy where it was computed, else from the
    trained pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of training on one batch."""

    optimizer_steps: int
    """0 if there was no gradient: all weights are unchanged."""
    nonfinite_steps: int
    """Optimizer steps skipped because a loss or the gradient was NaN or infinite."""
    metrics: Mapping[str, Metric]
    seconds: Mapping[str, float]
    token_records: tuple[TokenRecord | None, ...] = ()
    """One for each sample of the batch, or of the rank's shard in order; None for a
    sample that no optimizer step of the policy saw. Empty: nothing was recorded."""


class Trainer(Protocol):
    """All ranks of the trainer behind one handle (`train/trainer/train_handle.py`)."""

    async def train(self, batch: TrainBatch) -> StepResult: ...

    async def save_checkpoint(self, path: str) -> FileEntries:
        """Save a checkpoint and return the entries of its files, below `path`; the
        small ones may be missing."""
        ...

    async def load_checkpoint(self, path: str) -> None: ...

    async def export_hugging_face(self, path: str) -> FileEntries:
        """Export a Hugging Face folder. Returns entries like `save_checkpoint`."""
        ...


# ---------------------------------------------------- seams of the weight transaction


WeightLayout = tuple[TensorSpec, ...]
"""The tensors that the trainer sends, in sending order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """Weights written where the transport's receivers can read them."""

    version: WeightVersion
    handle: str = field(repr=False)
    """Opaque to the transaction; its meaning is the transport's: path and slot for the
    arena, serialized handles for buckets."""
    checksums: Mapping[str, str]
    """Tensor name -> hex xxh3-64 of its bytes in Hugging Face order (row-major), or
    `checksums_add_up`."""
    num_bytes: int
    checksums_add_up: bool = False
    """The checksums are those of `weights/checksums/multilinear_checksum.py`: for
    engines of several ranks, and on a GPU."""


class WeightSender(Protocol):
    """The trainer's end of a weight transport."""

    async def layout(self) -> WeightLayout: ...

    async def stage(self, version: WeightVersion) -> StagedWeights:
        """Write the current weights. The previously staged weights stay intact until
        the next call."""
        ...

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        """Return the log-prob of each prompt's token t >= 1 given those before it, at
        temperature 1: [T-1] each."""
        ...


class WeightReceiver(Protocol):
    """One engine's end of a weight transport. Every call has a deadline and raises
    InvrlError."""

    @property
    def name(self) -> str: ...
    async def check(self, layout: WeightLayout, staged: StagedWeights) -> None:
        """Raise LayoutError unless the layout has every tensor of the engine exactly
        once, with the engine's name, shape and dtype."""

    async def pause(self) -> None:
        """Stop generation until `resume`: no token is sampled, and new requests
        wait."""

    async def sleep(self) -> None:
        """Free the memory of a paused engine's cache until `wake`."""

    async def wake(self) -> None:
        """Give the engine that memory back if `sleep` freed it."""

    async def load(self, staged: StagedWeights) -> None:
        """Copy the bytes into the engine."""

    async def checksums(self, staged: StagedWeights) -> Mapping[str, str]:
        """Return hashes of the engine's own parameters, in the form of
        `StagedWeights.checksums`: read back now, or, directly after `load`, as the
        transport computed them while loading."""
        ...

    async def commit(self, version: WeightVersion) -> None: ...
    async def resume(self) -> None: ...
    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]: ...
