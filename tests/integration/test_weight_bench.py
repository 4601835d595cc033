"""`invrl bench weights` against a real engine, on a tiny model, where its ratios mean nothing."""

from __future__ import annotations

from pathlib import Path

import torch

from invrl.bench.changing_weights import ChangingModel
from invrl.bench.weight_updates import UpdatedEngine, measure_idle, measure_in_flight
from invrl.engines.fleet import Fleet
from invrl.engines.sglang_client import SglangClient

CANARY = [[1, 20, 35, 70, 300, 410, 9, 2], [5, 400, 33, 33, 90, 100, 511]]


async def test_updates_are_measured_idle_and_with_requests_in_flight(
    tiny_model: Path, tiny_fleet: Fleet, router_client: SglangClient
) -> None:
    engine = UpdatedEngine(
        ChangingModel(tiny_model, torch.float32),
        tiny_fleet.engines["engine-0"].receiver,
        canary_prompts=CANARY,
        dtype="float32",
        deadline_s=180.0,
    )
    await engine.warm_up()
    idle = await measure_idle(engine, name="idle", updates=2)
    assert idle.failure == ""
    assert idle.ratios["idle"] > 0
    phases = idle.details["idle"]["phases"]
    assert {"stage", "prepare", "pause", "load", "commit", "resume", "canary"} <= phases.keys()

    flight = await measure_in_flight(engine, router_client, number=8, updates=3, deadline_s=180.0)
    assert flight.failure == ""
    assert flight.ratios["gap_8_retract"] > 0
    assert flight.ratios["failed_requests_8"] == flight.ratios["unequal_tensors_8"] == 0
    seconds = flight.details["in_flight_8"]
    assert 0 < seconds["decode_step_s"] < seconds["gap_s"]["median"] <= seconds["gap_s"]["longest"]

    await engine.change_weights()
    assert await engine.unequal_tensors() == 25  # all that the trainer has changed and not sent
