"""The one exception tree. A bad rollout is data (`types.FailedRollout`), never an
exception.

InvrlError
├── ConfigError            bad input: names the field, the value, the reason and the fix
│   └── PluginError        user code that cannot be imported, is not callable, or has the wrong signature
├── DamagedFileError       a file that a run wrote is missing or was changed; names the file
│   ├── NewerFormatError   a newer version of invrl wrote it
│   └── OtherModelError    it is of another model than the run's
├── DeadlineError          a wait across a process ran out; says what it waited for
│   └── ActorSilentError   a Ray actor did not answer a call in time
├── ServerError            an OS process that we started did not come up, died, or answered wrongly
│   ├── ActorDiedError     a Ray actor died before it answered a call
│   ├── NoEngineError      no engine got the request
│   └── WrongReplyError   an engine's reply cannot be read, or cannot be true
├── SessionError           the gateway refuses a request; carries the HTTP status and a machine-readable code
├── UnsendableTaskError    a task that cannot be written as JSON, for an environment that leases over HTTP
├── UnusableRowError       a row of a data file that cannot be trained; says what is wrong with it
├── IdenticalFailuresError rollouts in a row failed in the same way and none finished: continuing is useless
├── FilteredOutError       the group filter drops every group: the run ends normally, its model saved
├── BufferStateError       an impossible transition of the buffer
├── RunStoreError          the run's store cannot be read or written, or lacks what it must hold
├── TrainError             the trainer cannot continue (non-finite loss, weights that do not fit, ...)
└── WeightSyncError        a weight update did not commit: engines hold the old version, or leave the fleet
    ├── BroadcastError     a broadcast of weights broke, by another of its engines or by the connection
    ├── LayoutError        names, shapes or dtypes do not fit: no engine's weights were written
    ├── ChecksumError      the engine does not hold the bytes that the trainer sent
    └── CanaryError        the served model computes other log-probs than the trained one
"""

import copyreg
from pathlib import Path


class InvrlError(Exception):
    """Root of everything that invrl raises on purpose. Picklable, whatever arguments
    its constructor takes."""

    def __reduce__(self) -> tuple[object, ...]:
        # Exception's own __reduce__ calls the constructor with `args`, which our
        # constructors do not take.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(InvrlError):
    """Bad input, found before any process starts."""

    def __init__(self, field: str, value: object, reason: str, fix: str) -> None:
        super().__init__(f"{field} = {value!r}: {reason}. Fix: {fix}")
        self.field = field
        self.value = value
        self.reason = reason
        self.fix = fix


class PluginError(ConfigError):
    """User code given by import path cannot be used."""


class DamagedFileError(InvrlError):
    """A file of a run folder is missing or was changed. Retrying does not help."""

    def __init__(self, path: Path, reason: str, fix: str = "") -> None:
        message = f"{path}: {reason}"
        if fix:
            message += f". Fix: {fix}"
        super().__init__(message)
        self.path = path
        self.reason = reason
        self.fix = fix


class NewerFormatError(DamagedFileError):
    """The file was written by a newer version of invrl, in a format that this one does
    not know."""


class OtherModelError(DamagedFileError):
    """The file is intact but belongs to another model than the run's."""


class DeadlineError(InvrlError):
    """A wait that crosses a process ran out."""

    def __init__(self, waited_for: str, seconds: float) -> None:
        super().__init__(f"waited {seconds:.1f} s for {waited_for}")
        self.waited_for = waited_for
        self.seconds = seconds


class ActorSilentError(DeadlineError):
    """A Ray actor did not answer a call in time. Only for a missing answer: a
    DeadlineError raised inside the actor stays a DeadlineError."""


class ServerError(InvrlError):
    """A server process did not start, died or misbehaved. The message ends with its
    last log lines."""


class ActorDiedError(ServerError):
    """The process of a Ray actor died before it answered a call."""


class NoEngineError(ServerError):
    """No engine got the request, so nothing has been sampled: the router has none at the
    moment, does not reach the one that it chose, or is away itself."""


class WrongReplyError(ServerError):
    """An engine's reply cannot be read, or cannot be true; none of it is used. After a
    generation the engine is suspect."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine's answer is wrong: {reason}")


class SessionError(InvrlError):
    """The gateway refuses a request. The dialect turns this into its own error body."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """`param` is the invalid field of the request."""
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class UnsendableTaskError(InvrlError):
    """A task that cannot be written as JSON cannot be sent to an environment over
    HTTP."""


class UnusableRowError(InvrlError):
    """A row of a data file cannot be trained. The reader of the file adds the file and
    row."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}. Fix: {fix}")
        self.reason = reason
        self.fix = fix


class IdenticalFailuresError(InvrlError):
    """Rollouts in a row failed in the same way and none finished."""

    def __init__(self, text: str, *, fix: str) -> None:
        super().__init__(f"{text}. Fix: {fix}")
        self.text = text
        self.fix = fix


class FilteredOutError(InvrlError):
    """The group filter drops every group, so no batch completes: the task is solved, or
    the model never succeeds. The loop ends the run normally."""


class BufferStateError(InvrlError):
    """An impossible transition of the buffer: a bug in our code, or a task source that
    yields other tasks after a resume."""


class RunStoreError(InvrlError):
    """The run's store cannot be read or written (a full disk, for example), or lacks
    required data: the tokens of a taken batch, or the incarnation of a checkpoint."""


class DiskFullError(RunStoreError):
    """The disk of the run's store is full. The write can be retried once there is
    space."""


class TrainError(InvrlError):
    """The trainer cannot continue."""


class WeightSyncError(InvrlError):
    """A weight update did not commit."""

    def __init__(
        self, message: str, *, engine: str = "", unrestored: tuple[str, ...] = ()
    ) -> None:
        """`engine` failed first. `unrestored` engines may hold mixed or new weights;
        they are still paused and must leave the fleet."""
        super().__init__(message)
        self.engine = engine
        self.unrestored = unrestored


class BroadcastError(WeightSyncError):
    """A broadcast of weights broke. The engine that reports it is not at fault; it may
    hold a mix."""


class LayoutError(WeightSyncError):
    """The trainer's tensors do not fit. Raised before any engine's weights were
    written."""


class ChecksumError(WeightSyncError):
    """An engine does not hold the bytes that the trainer sent."""


class CanaryError(WeightSyncError):
    """Engine and trainer log-probs on the fixed prompts differ by more than the
    bound."""
