"""Settings of weight updates: the transport, the order of the engines, and how long an
update may take."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from invrl.types.section import Section, Text

_WAITS_OF_A_LOAD = 30
"""Waits for one of several engines that fit into the deadline of a phase."""

_HOST: Any = Field(
    None,
    description="the trainer's address for engines: they fetch 'disk', 'delta'; join 'collective'",
)


class WeightsConfig(Section):
    """Transport of new weights to the engines, and the proof that they are there. Each
    transport adds settings of its own."""

    plain_flags = ()
    transport: Literal["adapter", "arena", "bucket", "collective", "disk", "delta"] = (
        Field(
            "arena",
            description="'arena': shared memory; 'bucket': SGLang's; 'disk', 'delta': files; 'collective': broadcast; "
            "'adapter': the adapter of [lora] alone, while engines generate",
        )
    )
    update: Literal["together", "rolling"] = Field(
        "together",
        description="'together': engines pause at once; 'rolling': one by one, the others serve",
    )
    inflight: Literal["retract", "in_place", "drain"] = Field(
        "retract",
        description="running requests: compute their cache again, keep it, or end before an update",
    )
    drain_timeout_s: float = Field(
        60.0,
        gt=0,
        description="'drain': how long requests may take to end; the rest is retracted",
    )
    timeout_s: float = Field(
        300.0,
        gt=0,
        description="deadline of each phase of an update; pause, commit, resume: 60 s at most",
    )

    @property
    def bucket_timeout_s(self) -> float:
        """Deadline for each bucket that several engines load together, and for the
        engines of a broadcast to join. An engine that hangs leaves time for the
        others."""
        return self.timeout_s / _WAITS_OF_A_LOAD


class ArenaWeights(WeightsConfig):
    """Through shared memory of one machine."""

    transport: Literal["arena"] = "arena"  # pyright: ignore[reportIncompatibleVariableOverride]
    arena_mode: Literal["copy", "alias"] = Field(
        "copy",
        description="'arena': engines copy the weights, or compute with the shared memory itself",
    )
    arena_device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="'arena': in the host's memory, or in a GPU's, opened by CUDA IPC; "
        "'auto': in the GPU's if trainer and engines share one that has room",
    )
    readback_every: int = Field(
        10,
        ge=0,
        description="'arena': read an engine's weights back at every n-th update; 0: the first",
    )


class AdapterWeights(WeightsConfig):
    """The adapter alone, as a PEFT folder, which engines load beside the version that
    they serve."""

    transport: Literal["adapter"] = "adapter"  # pyright: ignore[reportIncompatibleVariableOverride]


class BucketWeights(WeightsConfig):
    """SGLang's own way: buckets, in shared memory or from the trainer's GPU."""

    transport: Literal["bucket"] = "bucket"  # pyright: ignore[reportIncompatibleVariableOverride]


class CollectiveWeights(WeightsConfig):
    """A broadcast to all engines."""

    transport: Literal["collective"] = "collective"  # pyright: ignore[reportIncompatibleVariableOverride]
    host: Text | None = _HOST


class _FileWeights(WeightsConfig):
    folder: Text | None = Field(
        None,
        description="'disk', 'delta': where engines find the weights; left out: in the run folder",
    )
    host: Text | None = _HOST


class DiskWeights(_FileWeights):
    """Files: each version whole."""

    transport: Literal["disk"] = "disk"  # pyright: ignore[reportIncompatibleVariableOverride]


class DeltaWeights(_FileWeights):
    """Files: what changed since the version before."""

    transport: Literal["delta"] = "delta"  # pyright: ignore[reportIncompatibleVariableOverride]
    full_every: int = Field(
        16,
        ge=1,
        description="'delta': every n-th version is written whole; 1: each of them",
    )


WeightsConfig.kinds = {
    "adapter": AdapterWeights,
    "arena": ArenaWeights,
    "bucket": BucketWeights,
    "collective": CollectiveWeights,
    "disk": DiskWeights,
    "delta": DeltaWeights,
}
FileWeights = DiskWeights | DeltaWeights
AnyWeights = (
    AdapterWeights | ArenaWeights | BucketWeights | CollectiveWeights | FileWeights
)


def _transport_kind(weights: Any) -> str:
    if isinstance(weights, WeightsConfig):
        return weights.transport
    return str(weights.get("transport", "arena"))


Weights = Annotated[
    Annotated[AdapterWeights, Tag("adapter")]
    | Annotated[ArenaWeights, Tag("arena")]
    | Annotated[BucketWeights, Tag("bucket")]
    | Annotated[CollectiveWeights, Tag("collective")]
    | Annotated[DiskWeights, Tag("disk")]
    | Annotated[DeltaWeights, Tag("delta")],
    Discriminator(_transport_kind),
]
"""The settings of one transport."""
