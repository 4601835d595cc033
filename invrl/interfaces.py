"""The plug points (user code by `package.module:name`) and the seams between our own parts.

Everything here is a Protocol or a value that one takes; `plugins.py` loads user code and checks its signature
at start-up. The loop, the dispatcher and the weight transaction know only these seams."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from invrl.metrics import Metric
from invrl.types import (
    MAX_NAME_LENGTH,
    MAX_REWARD_COMPONENTS,
    DroppedGroup,
    Group,
    GroupLease,
    Outcome,
    TakenBatch,
    Task,
    TensorSpec,
    TrainBatch,
    WeightVersion,
)

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from torch import Tensor

# ------------------------------------------------------------------ what users write


class Endpoint(Protocol):
    """What a rollout function is given: an OpenAI and Anthropic endpoint of its own (one session)."""

    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...
    @property
    def model(self) -> str: ...
    def openai(self) -> AsyncOpenAI:
        """A ready client; its retries and deadline are set for this session."""
        ...

    def anthropic(self) -> Any:
        """As `openai`, an `anthropic.AsyncAnthropic`. ImportError where that package is missing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """What a rollout function may return instead of a bare float. Raises ValueError for components that the
    gateway would refuse: too many, or with names that are too long."""

    reward: float | None = None
    """None only where a reward function is set."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, for the metrics."""
    output: str = ""
    """Whatever the reward function needs (the final answer, say)."""

    def __post_init__(self) -> None:
        if isinstance(self.components, Mapping) and (fault := components_fault(self.components)):
            raise ValueError(fault)


def components_fault(components: Mapping[str, float]) -> str:
    """What is wrong with the number or the names of a reward's components; "" if nothing is."""
    if len(components) > MAX_REWARD_COMPONENTS:
        return f"RolloutResult.components has {len(components)} entries; at most {MAX_REWARD_COMPONENTS} fit"
    for name in components:
        if isinstance(name, str) and len(name) > MAX_NAME_LENGTH:
            return (
                f"RolloutResult.components has a name of {len(name)} characters, {name[:40]!r}...; "
                f"at most {MAX_NAME_LENGTH} fit"
            )
    return ""


class RolloutFn(Protocol):
    """Runs one task. Async or sync (a sync one runs in a thread)."""

    def __call__(
        self, task: Task, endpoint: Endpoint
    ) -> float | RolloutResult | Awaitable[float | RolloutResult]: ...


class GroupRolloutFn(Protocol):
    """Runs a whole group (for relative judging), marked by `group = True`. Results in their order."""

    def __call__(
        self, task: Task, endpoints: Sequence[Endpoint]
    ) -> Sequence[float | RolloutResult] | Awaitable[Sequence[float | RolloutResult]]: ...


class RewardFn(Protocol):
    def __call__(self, task: Task, result: RolloutResult) -> float | Awaitable[float]: ...


class TaskSource(Protocol):
    """Tasks of a split ("train": as long as the run asks; "eval": finite and never among the others),
    the same ones for the same seed."""

    def __call__(self, split: str, seed: int) -> Iterator[Task]: ...


class GroupFilter(Protocol):
    """Keeps a complete group (None) or drops it with a reason (a short snake_case word)."""

    def __call__(self, group: Group) -> str | None: ...


class AdvantageFn(Protocol):
    """One advantage per reward from rewards that are compared with each other; both float64 [G]. G is the
    group's size for final rewards, and any number from 1 on for those of turns, branches and children."""

    def __call__(self, rewards_G: NDArray[np.float64], *, eps: float) -> NDArray[np.float64]: ...


class PolicyLoss(Protocol):
    """Loss of each token from its ratio current/old (which carries the gradient) and its advantage; all
    torch float32 [N]. Off-policy correction, KL and aggregation come after it."""

    def __call__(
        self, ratio_N: Tensor, advantages_N: Tensor, *, eps_clip_low: float, eps_clip_high: float
    ) -> Tensor: ...


# ------------------------------------------------------------------ seams of the loop


class Buffer(Protocol):
    """The buffer as others hold it (`buffer/buffer_handle.py`; the state machine is `buffer/buffer.py`)."""

    async def lease(self) -> GroupLease | None:
        """Work to run now; None while the staleness bound or the task source admits no more."""

    async def record(self, outcome: Outcome) -> None:
        """Idempotent: the same outcome may arrive again after a crash."""

    async def unwanted(self) -> Sequence[DroppedGroup]:
        """Groups that were dropped while rollouts of theirs ran, each named once, so that those can be
        cancelled. Waits for the first one; empty if none comes for a while. A group that has been named is
        in no lease that is asked for afterwards."""
        ...

    async def take(self) -> TakenBatch:
        """The next batch of whole groups within the staleness bound. DeadlineError names what is missing;
        FilteredOutError says that the group filter drops everything."""
        ...

    async def trained(self, batch_id: int) -> None: ...

    async def snapshot(self, trained: WeightVersion) -> bytes:
        """The buffer for a checkpoint, between `trained` and `advance`; `trained`: what the trainer holds."""
        ...

    async def advance(self, version: WeightVersion) -> None:
        """The trainer holds `version` and its canary has passed: tokens sampled under it count, admission and
        staleness count against it. With the version as it was: a run without a trainer has seen the batch."""

    async def metrics(self) -> Mapping[str, Metric]:
        """Counts since the last call (groups and rollouts by state and drop reason)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What training on one batch did. `optimizer_steps` 0: no gradient, so every weight is as it was."""

    optimizer_steps: int
    metrics: Mapping[str, Metric]
    seconds: Mapping[str, float]


class Trainer(Protocol):
    """All ranks of the trainer behind one handle (`train/train_handle.py`)."""

    async def train(self, batch: TrainBatch) -> StepResult: ...

    async def save_checkpoint(self, path: str) -> None: ...
    async def load_checkpoint(self, path: str) -> None: ...
    async def export_hugging_face(self, path: str) -> None: ...


# ------------------------------------------------------------------ seams of the weight transaction


WeightLayout = tuple[TensorSpec, ...]
"""What the trainer will send: the tensors, in sending order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """Weights written where the transport's receivers can take them. `handle` is the transport's own
    (for the arena: path and slot; for buckets: the serialized handles), opaque to the transaction."""

    version: WeightVersion
    handle: str
    checksums: Mapping[str, str]
    """Per tensor: hex xxh3-64 of its bytes in Hugging Face order (row-major)."""
    num_bytes: int


class WeightSender(Protocol):
    """The trainer's side of a transport."""

    async def layout(self) -> WeightLayout: ...

    async def stage(self, version: WeightVersion) -> StagedWeights:
        """Write the current weights. The weights staged before stay whole until the next call."""
        ...

    async def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Log-prob of each prompt's token t >= 1 given those before it (temperature 1): [T-1] each."""
        ...


class WeightReceiver(Protocol):
    """One engine's side of a transport. Every call has a deadline and raises InvrlError."""

    @property
    def name(self) -> str: ...
    async def check(self, layout: WeightLayout, staged: StagedWeights) -> None:
        """LayoutError unless names, shapes and dtypes are the engine's, all of them, each once."""

    async def pause(self) -> None:
        """Generation stands still; running requests are retracted and held; the cache is flushed."""

    async def load(self, staged: StagedWeights) -> None:
        """Move the bytes into the engine."""

    async def checksums(self, staged: StagedWeights) -> Mapping[str, str]:
        """Hashes read back from the engine's own parameters, as in StagedWeights.checksums."""
        ...

    async def commit(self, version: WeightVersion) -> None: ...
    async def resume(self) -> None: ...
    async def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]: ...
