"""Whether an engine holds the committed weights: its parameters as read back, compared
by checksum.

Pure; what is read back comes from `engines/weight_receiver.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from invrl.weights.tensor_spec import num_bytes
from invrl.weights.transaction import Committed


class ReadBack(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine holds."""

    version: str
    """The engine's own name for it."""
    checksums: Mapping[str, str]
    """Tensor name -> hex xxh3-64, as in `StagedWeights.checksums`."""
    paused_s: float
    """For how long the engine generated nothing."""


class EngineVerification(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one engine."""

    engine: str
    version: str = ""
    num_tensors: int = 0
    num_bytes: int = 0
    different: tuple[str, ...] = ()
    """Tensors that are not the committed ones, in the order of the layout."""
    paused_s: float = 0.0
    error: str = ""
    """Not empty if the engine could not be read."""


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The result for a fleet."""

    version: str = ""
    """The committed one."""
    engines: tuple[EngineVerification, ...] = ()
    error: str = ""
    """Not empty if nothing could be compared."""

    @property
    def all_equal(self) -> bool:
        """Whether at least one engine was read, and all of them hold the committed
        weights."""
        if self.error or not self.engines:
            return False
        return all(
            engine.version == self.version and not engine.different and not engine.error
            for engine in self.engines
        )


def compare(
    committed: Committed, engine: str, read_back: ReadBack
) -> EngineVerification:
    """Compare what an engine holds with what was committed, tensor by tensor."""
    held = read_back.checksums
    expected = committed.staged.checksums
    different = [name for name in expected if held.get(name) != expected[name]]
    different += [name for name in held if name not in expected]
    return EngineVerification(
        engine=engine,
        version=read_back.version,
        num_tensors=len(held),
        num_bytes=sum(
            num_bytes(spec) for spec in committed.layout if spec.name in held
        ),
        different=tuple(different),
        paused_s=read_back.paused_s,
    )


def describe(verification: Verification) -> str:
    """A line per engine."""
    if verification.error:
        return verification.error
    return "\n".join(
        _describe_engine(engine, verification.version)
        for engine in verification.engines
    )


def _describe_engine(engine: EngineVerification, committed: str) -> str:
    if engine.error:
        return f"{engine.engine}: cannot be read: {engine.error}"
    facts = f"{engine.num_tensors} tensors, {engine.num_bytes:,} bytes"
    line = f"{engine.engine}: version {engine.version}, {facts}, {_finding(engine, committed)}"
    return f"{line} (paused for {1000 * engine.paused_s:.0f} ms)"


def _finding(engine: EngineVerification, committed: str) -> str:
    if engine.different:
        count = len(engine.different)
        return f"DIFFERENT from the committed version {committed} in {count}, {engine.different[0]} first"
    if engine.version != committed:
        return f"equal to version {committed}, which is committed, but called {engine.version}"
    return "equal to what was committed"
