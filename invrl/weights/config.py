"""Settings of weight updates: the transport, the order of the engines, and how long an
update may take."""

from typing import Literal

from pydantic import Field

from invrl.types.section import Section, Text

_WAITS_OF_A_BROADCAST = 30
"""Waits that fit into the deadline of a phase."""


class WeightSyncConfig(Section):
    """Transport of new weights to the engines, and proof that they arrived."""

    weight_transport: Literal["arena", "bucket", "disk", "delta", "collective"] = Field(
        "arena",
        description="'arena': shared memory; 'bucket': SGLang's; 'disk', 'delta': files; 'collective': gloo",
    )
    weight_folder: Text | None = Field(
        None,
        description="'disk', 'delta': where engines find the weights; left out: in the run folder",
    )
    weight_host: Text | None = Field(
        None,
        description="the trainer's address for engines: they fetch 'disk', 'delta'; join 'collective'",
    )
    weight_full_every: int = Field(
        16,
        ge=1,
        description="'delta': every n-th version is written whole; 1: each of them",
    )
    weight_update: Literal["together", "rolling"] = Field(
        "together",
        description="'together': engines pause at once; 'rolling': one by one, the others serve",
    )
    weight_update_inflight: Literal["retract", "in_place", "drain"] = Field(
        "retract",
        description="running requests: compute their cache again, keep it, or end before an update",
    )
    weight_drain_timeout_s: float = Field(
        60.0,
        gt=0,
        description="'drain': how long requests may take to end; the rest is retracted",
    )
    weight_arena: Literal["copy", "alias"] = Field(
        "copy",
        description="'arena': engines copy the weights, or compute with the shared memory itself",
    )
    weight_arena_device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="'arena': in the host's memory, or in a GPU's, opened by CUDA IPC; "
        "'auto': in the GPU's if trainer and engines share one that has room",
    )
    weight_sync_timeout_s: float = Field(
        300.0,
        gt=0,
        description="deadline of each phase of an update; pause, commit, resume: 60 s at most",
    )
    weight_readback_every: int = Field(
        10,
        ge=0,
        description="'arena': read an engine's weights back at every n-th update; 0: the first",
    )

    @property
    def broadcast_timeout_s(self) -> float:
        """Seconds that 'collective' waits for the engines to join, and then for each
        bucket. An engine that hangs leaves time for a second broadcast to the
        others."""
        return self.weight_sync_timeout_s / _WAITS_OF_A_BROADCAST
