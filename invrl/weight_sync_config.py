"""Settings of the weight transaction (`weight_sync.py`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from invrl.section import Section


class WeightSyncConfig(Section):
    """How new weights reach the engines, and what proves that they are there."""

    weight_carrier: Literal["arena", "bucket"] = Field(
        "arena", description="'arena': shared memory on one machine; 'bucket': SGLang's flattened buckets"
    )
    weight_sync_timeout_s: PositiveFloat = Field(
        300.0, description="deadline of each phase of an update; pause, commit and resume have 60 s at most"
    )
