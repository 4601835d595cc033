"""When an engine's parameters are read back: against the loader itself, without SGLang
around it."""

from __future__ import annotations

import base64
import subprocess
import sys

import msgspec
import pytest
import torch
from loader_engines import LAYOUT, LoaderEngine, receiver_of

from invrl.engines.client.weight_receiver import ArenaReceiver
from invrl.errors import ChecksumError
from invrl.interfaces import StagedWeights
from invrl.types.weights import WeightVersion
from invrl.weights.loader import weight_loader
from invrl.weights.loader.loader_messages import LoaderRequest
from invrl.weights.transports.arena import ArenaWriter


@pytest.fixture
def engine() -> LoaderEngine:
    return LoaderEngine()


@pytest.fixture
def writer() -> ArenaWriter:
    return ArenaWriter(LAYOUT)


def stage(writer: ArenaWriter, version: int) -> StagedWeights:
    tensors = {spec.name: torch.full(spec.shape, float(version)) for spec in LAYOUT}
    return writer.stage(WeightVersion(version), tensors.items())


async def load(receiver: ArenaReceiver, staged: StagedWeights) -> bool:
    """Whether the engine's checksums are those of what was staged."""
    await receiver.check(LAYOUT, staged)
    await receiver.load(staged)
    return dict(await receiver.checksums(staged)) == dict(staged.checksums)


@pytest.mark.parametrize("arena", ["copy", "alias"])
@pytest.mark.parametrize(
    ("readback_every", "expected"),
    [
        (1, [True, True, True, True, True, True, True]),
        (3, [True, False, False, True, False, False, True]),
        (0, [True, False, False, False, False, False, False]),
    ],
)
async def test_first_load_and_every_nth_load_are_read_back(
    engine: LoaderEngine,
    writer: ArenaWriter,
    readback_every: int,
    expected: list[bool],
    arena,
) -> None:
    receiver = receiver_of(engine, readback_every, arena)
    for version in range(1, 8):
        assert await load(receiver, stage(writer, version))
    assert engine.loads == expected
    assert len(engine.requests) == 8  # one for the layout, then one for each update


async def test_load_after_an_unproved_load_is_read_back(
    engine: LoaderEngine, writer: ArenaWriter
) -> None:
    receiver = receiver_of(engine, 0)
    assert await load(receiver, stage(writer, 1))
    staged = stage(writer, 2)
    writer._slots[1]["model.norm.weight"][3] = 9.0
    assert not await load(receiver, staged)
    assert await load(receiver, stage(writer, 3))
    assert await load(receiver, stage(writer, 4))
    assert engine.loads == [True, False, True, False]


async def test_repeated_checksum_request_reads_the_engine_back(
    engine: LoaderEngine, writer: ArenaWriter
) -> None:
    receiver = receiver_of(engine, 0)
    staged = stage(writer, 1)
    assert await load(receiver, staged)
    engine.parameters["model.norm.weight"][3] = 9.0
    held = await receiver.checksums(staged)
    wrong = [name for name, value in staged.checksums.items() if held[name] != value]
    assert wrong == ["model.norm.weight"]
    second = stage(writer, 2)
    await receiver.load(second)
    assert dict(await receiver.checksums(staged)) == dict(second.checksums)


class TestAnAlias:
    async def test_slot_with_other_bytes_than_staged_is_refused_before_the_pause(
        self, engine: LoaderEngine, writer: ArenaWriter
    ) -> None:
        receiver = receiver_of(engine, 0, "alias")
        assert await load(receiver, stage(writer, 1))
        staged = stage(writer, 2)
        writer._slots[1]["model.norm.weight"][3] = 9.0
        with pytest.raises(
            ChecksumError, match=r"1 of 2 tensors .* model\.norm\.weight first"
        ):
            await receiver.check(LAYOUT, staged)
        assert engine.loads == [True]

    async def test_parameters_not_pointed_at_the_slot_do_not_prove_the_load(
        self, engine: LoaderEngine, writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        receiver = receiver_of(engine, 0, "alias")
        assert await load(receiver, stage(writer, 1))
        with monkeypatch.context() as patched:
            patched.setattr(
                weight_loader, "_point_at", lambda model, views, lease: lease.release()
            )
            assert not await load(receiver, stage(writer, 2))
        assert await load(receiver, stage(writer, 2))
        assert engine.loads == [True, False, True]

    async def test_return_to_an_unhashed_slot_reads_the_parameters_back(
        self, engine: LoaderEngine, writer: ArenaWriter
    ) -> None:
        receiver = receiver_of(engine, 0, "alias")
        first = stage(writer, 1)
        second = stage(writer, 2)
        assert await load(receiver, first)
        assert await load(receiver, second)
        await receiver.load(first)
        assert dict(await receiver.checksums(first)) == dict(first.checksums)
        assert engine.loads == [True, False, True]
        assert engine.parameters["model.norm.weight"].unique().tolist() == [1.0]


PAYLOAD = """
import sys
from invrl.engines.client import weight_receiver
from invrl.weights.loader.loader_messages import LoaderRequest
print(weight_receiver._payload(LoaderRequest(reply_path="ünicode", tensors=())))
sys.exit("torch" in sys.modules)
"""


def test_request_is_pickled_without_torch_as_sglang_unpickles_it() -> None:
    from sglang.srt.utils import MultiprocessingSerializer

    made = subprocess.run(
        [sys.executable, "-c", PAYLOAD], check=True, capture_output=True, text=True
    )
    [(name, tensor)] = MultiprocessingSerializer.deserialize(
        base64.b64decode(made.stdout)
    )
    assert msgspec.json.decode(name, type=LoaderRequest).reply_path == "ünicode"
    assert (tensor.shape, tensor.dtype) == ((0,), torch.float32)
