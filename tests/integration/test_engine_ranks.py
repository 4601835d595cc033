"""A real engine of two ranks: weight updates that each takes its slice of. Without
SGLang, and what is wrong with slices: `tests/unit/test_rank_slices.py`."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import msgspec
import psutil
import pytest
from tiny_model import make_tiny_model
from torch_trainer import TorchSender
from torch_updates import Update

from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.errors import ChecksumError
from invrl.host.processes.fork_parent import ForkParent
from invrl.interfaces import StagedWeights
from invrl.weights.transports.arena import ArenaHandle

pytestmark = pytest.mark.slow


async def test_two_engine_ranks_load_their_slices_and_one_wrong_bit_rolls_both_back(
    engine_parent: ForkParent, tmp_path: Path
) -> None:
    """515 tokens, so that the vocabulary is padded."""
    model = make_tiny_model(tmp_path / "model", kv_heads=2, vocab_size=515)
    config = EngineConfig(
        dtype="float32",
        tp_size=2,
        start_timeout_s=500.0,
        health_interval_s=86_400.0,
    )
    shared_memory = set(Path("/dev/shm").glob("sgl_shm_*"))
    fleet = Fleet(config, model, tmp_path, parent=engine_parent)
    try:
        await fleet.start()
        engine = fleet.engines["engine-0"]
        names = [process.name() for process in engine.server.processes()]
        assert len([name for name in names if "scheduler_TP" in name]) == 2
        assert all(
            ipaddress.ip_address(address).is_loopback
            for address in listening(engine.server.pid)
        )
        sender = TorchSender(model, checksums_add_up=True)
        update = Update(sender, [engine.receiver])
        for seed in range(3):
            sender.train(seed)
            done = await update.run()
            assert done.canary_max_gap <= 1e-3
        before = await engine.receiver.read_back(sender.tensors)
        staged = update.transaction.committed
        assert staged is not None
        assert dict(before.checksums) == dict(staged.staged.checksums)

        def spoil(staged: StagedWeights) -> StagedWeights:
            slot = msgspec.json.decode(staged.handle, type=ArenaHandle).slot
            weight = sender.slots[slot]["model.layers.1.self_attn.o_proj.weight"]
            weight[5, 40] += 1.0  # of 64 columns: rank 1 alone reads it
            return staged

        sender.spoil = spoil
        sender.train(3)
        with pytest.raises(ChecksumError, match=r"1 of \d+ tensors .*o_proj") as raised:
            await update.run()
        assert raised.value.unrestored == ()
        after = await engine.receiver.read_back(sender.tensors)
        assert after.checksums == before.checksums
    finally:
        await fleet.stop()
    assert set(Path("/dev/shm").glob("sgl_shm_*")) <= shared_memory


def listening(pid: int) -> set[str]:
    """Addresses on which a process and those below it accept connections."""
    root = psutil.Process(pid)
    connections = [
        c
        for p in (root, *root.children(recursive=True))
        for c in p.net_connections("tcp")
    ]
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
