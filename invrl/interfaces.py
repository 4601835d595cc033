"""The plug points that users write, and the seams between our own parts.

Everything here is a Protocol, or a value that a Protocol takes or returns.
`user_code/plugins.py` loads user code by `package.module:name` and checks its signature
against these Protocols at start-up. The loop, the dispatcher and the weight transaction
know their neighbours only by the seams below.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from invrl.types.batches import TakenBatch, TrainBatch
from invrl.types.file_entry import FileEntries
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

    from invrl.algorithms.loss_inputs import LossInputs, LossOutputs

# ----------------------------------------------------------------- what users write


class Endpoint(Protocol):
    """What a rollout function gets: an OpenAI and Anthropic endpoint of its own (one
    session)."""

    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...
    @property
    def model(self) -> str: ...
    def openai(self) -> AsyncOpenAI:
        """A ready client whose retries and deadline are set for this session."""
        ...

    def anthropic(self) -> Any:
        """A ready `anthropic.AsyncAnthropic`, set up in the same way. Raises
        ImportError where that package is missing."""
        ...

    async def reward(
        self,
        value: float,
        *,
        turn: str = "",
        branch: str = "",
        components: Mapping[str, float] | None = None,
    ) -> None:
        """Rewards one turn, the branches through a turn, or, without either, this
        session: a child's own reward. (The reward that the rollout function returns
        counts for its own session.) A turn is named by the `id` of its answer, of any
        client. The last reward counts. Raises SessionError, DeadlineError."""
        ...

    async def open_child(self) -> Endpoint:
        """An endpoint for a sub-agent, with a session of its own: its conversation is
        kept apart, and it has this session's reward unless it is rewarded itself. It
        ends with this session. Raises SessionError, DeadlineError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """What a rollout function may return instead of a bare float.

    Numbers are of columns that `--extra-columns` declares. A turn is named by the `id`
    of its answer, of any client.

    Raises ValueError for components that the gateway would refuse: too many, or with
    names that are too long.
    """

    reward: float | None = None
    """May be None only where a reward function is set."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, for the metrics."""
    output: str = ""
    """Whatever the reward function needs, for example the final answer."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the rollout, by column."""
    turn_numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Numbers of turns, by answer id and column."""
    token_numbers: Mapping[
        str, Mapping[str, Sequence[float] | NDArray[np.floating]]
    ] = field(default_factory=dict)
    """Numbers of sampled tokens, by answer id and column: one for each token that the
    turn sampled, in order. The answer's usage counts them."""

    def __post_init__(self) -> None:
        if not isinstance(self.components, Mapping):
            return  # refused later, together with other wrong types
        fault = components_fault(self.components)
        if fault:
            raise ValueError(fault)


def components_fault(components: Mapping[str, float]) -> str:
    """What is wrong with the number or the names of a reward's components; "" if
    nothing is."""
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
    True`. Returns one result per endpoint, in the endpoints' order."""

    def __call__(
        self, task: Task, endpoints: Sequence[Endpoint]
    ) -> (
        Sequence[float | RolloutResult] | Awaitable[Sequence[float | RolloutResult]]
    ): ...


class RewardFn(Protocol):
    """The reward of a finished rollout. If it is set, it decides, whatever reward the
    rollout function returned."""

    def __call__(
        self, task: Task, result: RolloutResult
    ) -> float | Awaitable[float]: ...


class TaskSource(Protocol):
    """Yields the tasks of a split; the same tasks for the same seed. "train" yields as
    long as the run asks. "eval" is finite and has no task of "train".

    What it returns for "train" may have more than `__next__`: the method of
    `OutcomeRecorder`, those of `StateKeeper`, or both. Then it decides itself what
    comes next, and once it ends, no more tasks come; any other source that ends is
    called again."""

    def __call__(self, split: str, seed: int) -> Iterator[Task]: ...


@runtime_checkable
class OutcomeRecorder(Protocol):
    """Tasks that are told how their groups end, to pick the next ones."""

    def record(self, outcome: GroupOutcome) -> None:
        """Called once for every group that was leased, as soon as it is complete or
        dropped; not for groups that are open when the run ends. It is called in the
        buffer's process and must be quick. If it raises, that is shown and counted, and
        the run goes on without that outcome."""
        ...


@runtime_checkable
class StateKeeper(Protocol):
    """Tasks that go on after a resume where they were. Tasks that have neither these
    methods nor `record` need none: a resume reads the source again up to where it
    was."""

    def state(self) -> Json:
        """Everything that decides what comes next, as JSON that comes back unchanged,
        at most 64 MiB. Called for every checkpoint."""
        ...

    def restore(self, state: Json) -> None:
        """Called on a new object of the source, before anything else, with what `state`
        returned."""
        ...


class GroupFilter(Protocol):
    """Keeps a complete group (returns None) or drops it (returns the reason, a short
    snake_case word)."""

    def __call__(self, group: Group) -> str | None: ...


class HistoryGroupFilter(Protocol):
    """A group filter that has a parameter `history`: the groups of the same task before
    this one, in this run and, after a resume, in what it resumes."""

    def __call__(self, group: Group, *, history: TaskHistory) -> str | None: ...


class AdvantageFn(Protocol):
    """The advantage of each reward among rewards that are compared with each other;
    both float64 [G]. For final rewards G is the group's size; for rewards of turns,
    branches and children it is any number >= 1."""

    def __call__(
        self, rewards_G: NDArray[np.float64], *, eps: float
    ) -> NDArray[np.float64]: ...


class GroupAdvantageFn(Protocol):
    """An `AdvantageFn` with a parameter named `group` is given what is known of the
    rollouts: lengths, components of rewards, numbers of extra columns. `rewards_G[i]`
    is then the final reward of `group.rollouts_G[i]`. For rewards of turns, branches
    and children, which are not one per rollout, `group` is None."""

    def __call__(
        self, rewards_G: NDArray[np.float64], *, eps: float, group: Group | None = None
    ) -> NDArray[np.float64]: ...


class PolicyLoss(Protocol):
    """The loss of each token from its ratio current/old, which carries the gradient,
    and its advantage; all torch float32 [N]. Off-policy correction, KL and aggregation
    are applied to the result. A function with a further keyword `inputs=None` gets the
    LossInputs there: log-probs of all policies, rows, columns and numbers."""

    def __call__(
        self,
        ratio_N: Tensor,
        advantages_N: Tensor,
        *,
        eps_clip_low: float,
        eps_clip_high: float,
    ) -> Tensor: ...


class Objective(Protocol):
    """What a training step minimizes, from the trained tokens of one micro-batch. The
    loss is a scalar that depends on `inputs.current_N` or `inputs.entropy_N`; those of
    all micro-batches and ranks are added, so a mean is over `inputs.denominators`. The
    attribute `needs` (`algorithms.objectives.Needs`) says which log-probs it reads
    besides."""

    def __call__(self, inputs: LossInputs) -> LossOutputs: ...


# ----------------------------------------------------------------- seams of the loop


class Buffer(Protocol):
    """The buffer as other processes hold it (`buffer/buffer_handle.py`). Its state
    machine is `buffer/group_buffer.py`."""

    async def lease(self) -> GroupLease | None:
        """Work to run now; None while the staleness bound or the task source admits no
        more."""

    async def record(self, outcome: Outcome) -> None:
        """Idempotent: the same outcome may arrive again after a crash."""

    async def unwanted(self) -> Sequence[DroppedGroup]:
        """Groups that were dropped while rollouts of theirs ran, so that those can be
        cancelled.

        Each group is returned once. Waits for the first one and returns an empty
        sequence if none comes for a while. A group that was returned is in no lease
        that is requested afterwards.
        """
        ...

    async def take(self) -> TakenBatch:
        """The next batch of whole groups within the staleness bound. Raises
        DeadlineError, which names what is missing, and FilteredOutError if the group
        filter drops everything."""
        ...

    async def trained(self, batch_id: int) -> None: ...

    async def snapshot(self, trained: WeightVersion) -> bytes:
        """The buffer for a checkpoint, between `trained` and `advance`. `trained` is
        the version that the trainer holds."""
        ...

    async def advance(self, version: WeightVersion) -> None:
        """Says that the trainer holds `version` and that its canary has passed: tokens
        sampled under it count, and admission and staleness are counted against it. In a
        run without a trainer the version stays the same, and the call says that the
        batch was seen."""

    async def metrics(self) -> Mapping[str, Metric]:
        """Events since the last call by drop reason, and how many groups and rollouts
        are in each state now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRecord:
    """What a step trained one row with: float32 [N], for each trained token of the row
    in order."""

    advantages_N: NDArray[np.float32]
    logprobs_N: NDArray[np.float32]
    """The trainer's, in nats: under the old policy where it was computed, else of the
    pass that was trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What training on one batch did."""

    optimizer_steps: int
    """0 if there was no gradient: every weight is as before."""
    nonfinite_steps: int
    """Optimizer steps that were skipped because a loss or the gradient was NaN or
    infinite."""
    metrics: Mapping[str, Metric]
    seconds: Mapping[str, float]
    """Seconds per phase."""
    token_records: tuple[TokenRecord | None, ...] = ()
    """One for each sample of the batch, or of the rank's shard in order; None for a
    sample that no optimizer step of the policy saw. Empty: nothing was recorded."""


class Trainer(Protocol):
    """All ranks of the trainer behind one handle (`train/trainer/train_handle.py`)."""

    async def train(self, batch: TrainBatch) -> StepResult: ...

    async def save_checkpoint(self, path: str) -> FileEntries:
        """Returns the entries of files that were written, below `path`; the small ones
        may be missing."""
        ...

    async def load_checkpoint(self, path: str) -> None: ...

    async def export_hugging_face(self, path: str) -> FileEntries:
        """As `save_checkpoint`."""
        ...


# ---------------------------------------------------- seams of the weight transaction


WeightLayout = tuple[TensorSpec, ...]
"""The tensors that the trainer sends, in sending order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """Weights that were written where the transport's receivers can read them."""

    version: WeightVersion
    handle: str = field(repr=False)
    """Belongs to the transport and is opaque to the transaction: path and slot for the
    arena, serialized handles for buckets."""
    checksums: Mapping[str, str]
    """Tensor name -> hex xxh3-64 of its bytes in Hugging Face order (row-major), or
    `checksums_add_up`."""
    num_bytes: int
    checksums_add_up: bool = False
    """The checksums are those of `weights/multilinear.py`: for engines of several
    ranks, and on a GPU."""


class WeightSender(Protocol):
    """The trainer's end of a weight transport."""

    async def layout(self) -> WeightLayout: ...

    async def stage(self, version: WeightVersion) -> StagedWeights:
        """Writes the current weights. The weights staged before stay whole until the
        next call."""
        ...

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        """Log-prob of each prompt's token t >= 1 given those before it, at temperature
        1: [T-1] each."""
        ...


class WeightReceiver(Protocol):
    """One engine's end of a weight transport. Every call has a deadline and raises
    InvrlError."""

    @property
    def name(self) -> str: ...
    async def check(self, layout: WeightLayout, staged: StagedWeights) -> None:
        """Raises LayoutError unless the layout has every tensor of the engine exactly
        once, with the engine's name, shape and dtype."""

    async def pause(self) -> None:
        """Stops generation until `resume`: no token is sampled, and new requests
        wait."""

    async def sleep(self) -> None:
        """Frees the memory of a paused engine's cache until `wake`."""

    async def wake(self) -> None:
        """Gives the engine that memory back, if `sleep` has freed it."""

    async def load(self, staged: StagedWeights) -> None:
        """Copies the bytes into the engine."""

    async def checksums(self, staged: StagedWeights) -> Mapping[str, str]:
        """Hashes of what the engine's own parameters hold, in the form of
        `StagedWeights.checksums`: read back now, or, straight after `load`, as the
        transport took them while it loaded."""
        ...

    async def commit(self, version: WeightVersion) -> None: ...
    async def resume(self) -> None: ...
    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]: ...
