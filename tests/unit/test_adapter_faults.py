"""Faults of an update that sends an adapter alone, to two engines in this process: the
death of one of them in each phase, and damage to the folder of the new version. Requests
run meanwhile, and keep the version that they have."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_engine import MAX_RANK, AdapterEngine
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from weight_faults import FaultyReceiver, error_of

from invrl.engines.client.adapter_receiver import AdapterReceiver
from invrl.errors import ChecksumError, WeightSyncError
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.train.weights.disk_staging import WeightFolders
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.config import AdapterWeights
from invrl.weights.tensors.tensor_spec import checksum
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.transaction import WeightTransaction

FILE = "adapter_model.safetensors"
_LAYER = "base_model.model.model.layers.0.mlp"
LAYOUT = tuple(
    TensorSpec(name=f"{_LAYER}.{name}.weight", shape=shape, dtype="float32")
    for name, shape in {
        "up_proj.lora_A": (MAX_RANK, 8),
        "up_proj.lora_B": (16, MAX_RANK),
        "down_proj.lora_A": (MAX_RANK, 16),
        "down_proj.lora_B": (8, MAX_RANK),
    }.items()
)
CANARY = ((1, 2, 3),)


class AdapterTrainer:
    """Writes a PEFT folder per version, which a fault may change."""

    def __init__(self, folder: Path) -> None:
        self._folders = WeightFolders(
            LAYOUT, folder, file_name=FILE, describe=self._describe
        )
        self.spoil: Callable[[Path], object] = lambda folder: None

    @staticmethod
    def _describe(folder: Path) -> None:
        config = {"peft_type": "LORA", "r": MAX_RANK, "lora_alpha": 8.0}
        (folder / "adapter_config.json").write_text(json.dumps(config))

    async def layout(self) -> WeightLayout:
        return LAYOUT

    async def stage(self, version: WeightVersion) -> StagedWeights:
        tensors = [
            (spec.name, torch.full(spec.shape, float(version + 1))) for spec in LAYOUT
        ]
        staged = self._folders.stage(version, tensors)
        self.spoil(Path(staged.handle))
        return staged

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        return [np.zeros(len(ids) - 1, np.float32) for ids in prompts]


class AdapterFleet:
    """Two engines that serve version 0, each with a request of it."""

    def __init__(self, folder: Path) -> None:
        self.trainer = AdapterTrainer(folder)
        self.engines = [AdapterEngine() for _ in range(2)]
        self.receivers = [
            FaultyReceiver(AdapterReceiver(f"engine-{index}", client, AdapterWeights()))
            for index, client in enumerate[Any](self.engines)
        ]
        self.transaction = WeightTransaction(
            self.trainer,
            self._receivers,
            canary_prompts=CANARY,
            bound=CanaryBound.for_dtypes("float32", "float32"),
            pauses=False,
        )

    async def _receivers(self) -> list[FaultyReceiver]:
        return self.receivers

    async def begin(self) -> AdapterFleet:
        await self.transaction.run(WeightVersion(0))
        assert [engine.begin_request() for engine in self.engines] == ["0", "0"]
        return self

    def expect(self, version: int, *engines: AdapterEngine) -> None:
        """New requests get this version whole, and those of version 0 still run."""
        expected = torch.full(LAYOUT[0].shape, float(version + 1))
        for engine in engines:
            assert engine.named == engine.versions.newest == str(version)
            assert set(engine.served) == {spec.name for spec in LAYOUT}
            assert engine.served[LAYOUT[0].name] == checksum(expected)
            assert "0" in engine.adapters.held
            assert engine.adapters.aborted == []


@pytest.fixture
async def fleet(tmp_path: Path) -> AdapterFleet:
    return await AdapterFleet(tmp_path / "weights").begin()


@pytest.mark.parametrize(
    "phase", ["stage", "prepare", "load", "loaded", "commit", "canary"]
)
async def test_an_engine_that_dies_in_a_phase_is_lost_and_the_other_is_updated(
    fleet: AdapterFleet, phase: str
) -> None:
    survivor, victim = fleet.engines

    async def die_at(reached: str) -> None:
        if reached == phase:
            victim.die()

    if phase == "stage":
        fleet.trainer.spoil = lambda _: victim.die()
    fleet.receivers[1].before = die_at
    update = await fleet.transaction.run(WeightVersion(1))
    assert list(update.lost_engines) == ["engine-1"]
    assert update.seconds["paused"] == 0
    fleet.expect(1, survivor)
    # The fleet ends the lost engine; one that starts in its place gets the version.
    fleet.receivers.pop()
    newcomer: Any = AdapterEngine()
    receiver = FaultyReceiver(AdapterReceiver("engine-1", newcomer, AdapterWeights()))
    await fleet.transaction.bring_up(receiver, lambda: fleet.receivers.append(receiver))
    assert newcomer.begin_request() == "1"
    await fleet.transaction.run(WeightVersion(2))
    fleet.expect(2, survivor)
    assert newcomer.served == survivor.served


async def test_engines_that_all_die_fail_the_update(fleet: AdapterFleet) -> None:
    for engine in fleet.engines:
        engine.die()
    error = await error_of(fleet.transaction.run(WeightVersion(1)))
    assert set(error.unrestored) == {"engine-0", "engine-1"}


# ----------------------------------------------------------------- damaged folders


def flip_bit(folder: Path) -> None:
    body = bytearray((folder / FILE).read_bytes())
    body[-3] ^= 4
    (folder / FILE).write_bytes(body)


def truncate(folder: Path) -> None:
    body = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(body[: len(body) // 2])


def remove_file(folder: Path) -> None:
    (folder / FILE).unlink()


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = {name: t.clone() for name, t in load_file(folder / FILE).items()}
    change(tensors)
    save_file(tensors, folder / FILE)


def lose_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(LAYOUT[0].name))  # type: ignore[arg-type,return-value]


def cut_rank(folder: Path) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor[:1] if "lora_A" in name else tensor[:, :1]
            tensors[name] = tensors[name].contiguous()

    rewrite(folder, halve)


def claim_larger_rank(folder: Path) -> None:
    config = {"peft_type": "LORA", "r": MAX_RANK + 1, "lora_alpha": 8.0}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (flip_bit, ChecksumError, "1 of 4"),
        (lose_tensor, ChecksumError, "1 of 4"),
        (cut_rank, ChecksumError, "4 of 4"),
        (truncate, WeightSyncError, "HTTP 400"),
        (remove_file, WeightSyncError, "HTTP 400"),
        (claim_larger_rank, WeightSyncError, "rank 3"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_a_damaged_version_is_never_served(
    fleet: AdapterFleet,
    damage: Callable[[Path], None],
    error: type[WeightSyncError],
    says: str,
) -> None:
    fleet.trainer.spoil = damage
    raised = await error_of(fleet.transaction.run(WeightVersion(1)))
    assert type(raised) is error, repr(raised)
    assert says in str(raised)
    assert raised.unrestored == ()
    fleet.expect(0, *fleet.engines)
    # A sound folder under the same name replaces what engines hold of the damaged one.
    fleet.trainer.spoil = lambda folder: None
    update = await fleet.transaction.run(WeightVersion(1))
    assert update.lost_engines == {}
    fleet.expect(1, *fleet.engines)
