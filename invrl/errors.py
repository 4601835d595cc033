"""The one exception tree. A bad rollout is data (`types.FailedRollout`), never an exception.

InvrlError
├── ConfigError            bad input: names the field, the value, the reason and the fix
│   └── PluginError        an import path that does not import, is not callable, or does not fit
├── DamagedFileError       a file that a run wrote is gone, or is not what was written; names it
├── DeadlineError          a wait across a process ran out; says what it waited for
├── ServerError            an OS process we started did not come up, died, or answered wrongly
├── SessionError           refused by the gateway; carries the HTTP status and a machine-readable code
├── UnsendableTask         a task that JSON does not carry, for an environment that is sent JSON
├── IdenticalFailuresError rollouts in a row failed in the same way, and none finished: going on is of no use
├── FilteredOutError       the group filter drops everything: the run ends as a finished one does
├── BufferStateError       a transition the buffer's state machine does not have
├── TrainError             the trainer cannot go on (non-finite loss, a layout Megatron gets wrong, ...)
└── WeightSyncError        an update that did not commit; engines are on the old version, or out
    ├── LayoutError        names, shapes or dtypes do not fit the engine: nothing was sent
    ├── ChecksumError      the engine does not hold the bytes that the trainer sent
    └── CanaryError        the served model is not the trained one
"""

import copyreg
from pathlib import Path


class InvrlError(Exception):
    """Root of everything invrl raises on purpose. Can be pickled, whatever its constructor takes."""

    def __reduce__(self) -> tuple[object, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(InvrlError):
    """Bad input, found before any process starts."""

    def __init__(self, field: str, value: object, reason: str, fix: str) -> None:
        super().__init__(f"{field} = {value!r}: {reason}. Fix: {fix}")
        self.field, self.value, self.reason, self.fix = field, value, reason, fix


class PluginError(ConfigError):
    """User code given by import path cannot be used."""


class DamagedFileError(InvrlError):
    """A file of a run folder is missing, or is not what was written. Another try meets it again."""

    def __init__(self, path: Path, reason: str, fix: str = "") -> None:
        super().__init__(f"{path}: {reason}" + (f". Fix: {fix}" if fix else ""))
        self.path, self.reason, self.fix = path, reason, fix


class DeadlineError(InvrlError):
    """A wait that crosses a process ran out."""

    def __init__(self, waited_for: str, seconds: float) -> None:
        super().__init__(f"waited {seconds:.1f} s for {waited_for}")
        self.waited_for, self.seconds = waited_for, seconds


class ServerError(InvrlError):
    """A server process did not start, died or misbehaved; the message ends with its last log lines."""


class SessionError(InvrlError):
    """The gateway refuses a request; `param`: the field at fault. Becomes the dialect's own error body."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.code = message, status, code
        self.param, self.retry_after_s = param, retry_after_s


class UnsendableTask(InvrlError):
    """A task that JSON does not carry cannot go to an environment over HTTP."""


class IdenticalFailuresError(InvrlError):
    """Rollouts failed in the same way, one after the other, and none finished between them."""

    def __init__(self, text: str, *, fix: str) -> None:
        super().__init__(f"{text}. Fix: {fix}")
        self.text = text
        self.fix = fix


class FilteredOutError(InvrlError):
    """No batch comes together, because the group filter drops every group: the task is solved, or out of
    reach. The loop ends the run in order."""


class BufferStateError(InvrlError):
    """The buffer's state machine has no such transition: a bug of ours, never of the data."""


class TrainError(InvrlError):
    """The trainer cannot go on."""


class WeightSyncError(InvrlError):
    """A weight update did not commit. `engine` failed first; `unrestored` engines may hold mixed or new
    weights, stand paused, and must leave the fleet."""

    def __init__(self, message: str, *, engine: str = "", unrestored: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.engine, self.unrestored = engine, unrestored


class LayoutError(WeightSyncError):
    """The trainer's tensors do not fit the engine; found before a byte moved."""


class ChecksumError(WeightSyncError):
    """An engine does not hold the bytes that the trainer sent."""


class CanaryError(WeightSyncError):
    """Engine and trainer log-probs differ by more than the bound on the fixed prompts."""
