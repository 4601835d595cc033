"""Verification that an engine holds the committed weights: its parameters are read back
and compared by checksum.

Pure; the parameters are read back by `engines/client/weight_receiver.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from invrl.weights.tensors.tensor_spec import num_bytes
from invrl.weights.update.committed import Committed


class ReadBack(msgspec.Struct, frozen=True, kw_only=True):
    """Checksums and version of the weights that an engine holds."""

    version: str
    """Engine's own name for the version."""
    checksums: Mapping[str, str]
    """Tensor name -> hex xxh3-64, as in `StagedWeights.checksums`."""
    paused_s: float
    """Seconds that the engine generated nothing."""


class EngineVerification(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one engine."""

    engine: str
    version: str = ""
    num_tensors: int = 0
    num_bytes: int = 0
    different: tuple[str, ...] = ()
    """Tensors that differ from the committed ones, in the order of the layout."""
    paused_s: float = 0.0
    error: str = ""
    """Reason that the engine could not be read, or ""."""


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Result for a fleet."""

    version: str = ""
    """Committed version."""
    engines: tuple[EngineVerification, ...] = ()
    error: str = ""
    """Reason that nothing could be compared, or ""."""

    @property
    def all_equal(self) -> bool:
        """Whether at least one engine was read, and all hold the committed weights."""
        if self.error or not self.engines:
            return False
        return all(
            engine.version == self.version and not engine.different and not engine.error
            for engine in self.engines
        )


def compare(
    committed: Committed, engine: str, read_back: ReadBack
) -> EngineVerification:
    """Compare an engine's weights with the committed ones, tensor by tensor."""
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
    """Return a line per engine."""
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
