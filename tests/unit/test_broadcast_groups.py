"""The process group of a broadcast: gloo or NCCL, and who has not come. NCCL and the
GPU are replaced: what they are asked for is tested."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from invrl.errors import BroadcastError, LayoutError
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.transports import broadcast, broadcast_groups
from invrl.weights.transports.arena import ArenaWriter
from invrl.weights.transports.broadcast import (
    GroupInvitation,
    WeightGroup,
    receive_weights,
)
from invrl.weights.transports.broadcast_groups import NcclGroup
from invrl.weights.transports.broadcaster import Broadcaster

CPU = torch.device("cpu")
LAYOUT = (
    TensorSpec(name="a.weight", shape=(20,), dtype="float32"),
    TensorSpec(name="b.weight", shape=(3, 10), dtype="bfloat16"),
)
SENT_BYTES = 192
"""Both parameters are rounded up to a multiple of 64 bytes."""
VARIABLES = ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


@dataclass
class FakeNccl:
    """All that NCCL is asked for, and the bytes that it has carried."""

    arguments: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str | None] = field(default_factory=dict)
    carried: list[bytes] = field(default_factory=list)
    given: list[bytes] = field(default_factory=list)
    """What members receive."""
    streams: list[str] = field(default_factory=list)
    """The stream of each broadcast."""
    waits: int = 0
    fails: bool = False
    while_made: Callable[[], None] = lambda: None
    """Runs in the constructor of a group."""
    while_waited: Callable[[], None] = lambda: None
    aborted: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    fake = FakeNccl()
    stream = ["current"]

    class Work:
        def wait(self) -> None:
            fake.waits += 1
            fake.while_waited()
            if fake.fails:
                raise RuntimeError("a member has ended")

    class Group:
        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            fake.arguments = {
                "rank": rank,
                "size": size,
                "timeout": options._timeout,
            }
            fake.variables = {name: os.environ.get(name) for name in VARIABLES}
            self.timeout = options._timeout
            fake.while_made()

        def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
            [tensor] = tensors
            assert options.rootRank == 0
            assert options.timeout == self.timeout
            fake.streams.append(stream[0])
            if fake.given:
                received = torch.frombuffer(
                    bytearray(fake.given.pop(0)), dtype=torch.uint8
                )
                tensor.copy_(received)
            fake.carried.append(tensor.numpy().tobytes())
            return Work()

        def abort(self) -> None:
            fake.aborted.set()

    @contextmanager
    def on_stream(name: str) -> Iterator[None]:
        before = stream[0]
        stream[0] = name
        yield
        stream[0] = before

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "copies")
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    return fake


def nccl_group(rank: int, timeout_s: float = 7) -> NcclGroup:
    timeout = timedelta(seconds=timeout_s)
    return NcclGroup(HashStore(), rank, 3, device=CPU, timeout=timeout)


def invitation(rank: int, backend: str, timeout_s: float = 7.0) -> GroupInvitation:
    fields = {
        "host": "127.0.0.1",
        "port": 1,
        "key": "key",
        "rank": rank,
        "world_size": 3,
        "backend": backend,
        "timeout_s": timeout_s,
    }
    return msgspec.convert(fields, GroupInvitation)


def test_group_of_nccl_connects_at_once_and_its_waits_raise(nccl: FakeNccl) -> None:
    """Torch would end the process otherwise, or wait for its next use."""
    group = nccl_group(rank=2)
    assert nccl.arguments == {"rank": 2, "size": 3, "timeout": timedelta(seconds=7)}
    assert nccl.variables == dict(zip(VARIABLES, ("1", "0"), strict=True))
    assert not set(VARIABLES) & os.environ.keys()
    assert nccl.carried == [b"\0"]
    assert nccl.waits == 1
    nccl.fails = True
    with pytest.raises(RuntimeError, match="has ended"):
        group.broadcast(group.buffer(4)).wait()


def test_variables_of_the_user_are_back_when_the_group_is_made(
    nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLES[1], "3")
    nccl_group(rank=0)
    assert nccl.variables[VARIABLES[1]] == "0"
    assert os.environ[VARIABLES[1]] == "3"


def test_one_group_at_a_time_changes_the_variables(nccl: FakeNccl) -> None:
    """The trainer makes groups in several threads."""
    at_once: list[int] = []
    both_inside = threading.Event()
    inside = threading.Semaphore(0)

    def make() -> None:
        inside.release()
        at_once.append(inside._value)
        if inside._value == 2:
            both_inside.set()
        both_inside.wait(0.2)
        inside.acquire()

    nccl.while_made = make
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(nccl_group, (0, 1)))
    assert at_once == [1, 1]
    assert not set(VARIABLES) & os.environ.keys()


def test_connection_that_a_member_holds_up_ends_with_the_timeout(
    nccl: FakeNccl,
) -> None:
    is_over = threading.Event()
    nccl.while_waited = lambda: assert_set(is_over)
    with pytest.raises(BroadcastError, match=r"did not connect within 0\.05 s"):
        nccl_group(rank=1, timeout_s=0.05)
    assert_set(nccl.aborted)
    is_over.set()


def assert_set(event: threading.Event) -> None:
    assert event.wait(30)


def joined(rank: int, monkeypatch: pytest.MonkeyPatch) -> WeightGroup:
    """Return a group with small buckets, whose connection is not counted."""
    monkeypatch.setitem(broadcast.BUCKET_BYTES, "nccl", 100)
    return WeightGroup(invitation(rank, "nccl"), HashStore(), CPU)


def test_trainer_sends_a_slot_in_the_order_of_its_bytes(
    nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = joined(0, monkeypatch)
    memory = torch.arange(250, dtype=torch.uint8)
    group.send(memory)
    sent = memory.numpy().tobytes()
    assert nccl.carried[1:] == [sent[:100], sent[100:200], sent[200:]]
    assert nccl.waits == 4
    assert nccl.streams == 4 * ["copies"], "behind the copy, not behind a step"


def test_engine_receives_a_slot_into_its_parameters(
    nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ArenaWriter(LAYOUT)
    tensors = {
        "a.weight": torch.rand(20),
        "b.weight": torch.rand(3, 10).bfloat16(),
    }
    writer.stage(WeightVersion(1), tensors.items())
    slot = writer._slots[0]["a.weight"].untyped_storage()
    sent = bytes(slot)[:SENT_BYTES]
    group = joined(1, monkeypatch)
    nccl.given = [sent[:100], sent[100:]]
    monkeypatch.setattr(broadcast, "_join", lambda invitation, device: group)
    places = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    monkeypatch.setattr(broadcast, "_check_device", lambda invitation, device: None)
    receive_weights(invitation(1, "nccl"), LAYOUT, places)
    for name, tensor in tensors.items():
        assert torch.equal(places[name], tensor)
    assert nccl.streams[1:] == 2 * ["current"], "behind the copy into the parameters"


def test_engine_on_a_cpu_refuses_a_broadcast_between_gpus() -> None:
    places = {spec.name: torch.zeros(spec.shape) for spec in LAYOUT}
    with pytest.raises(LayoutError, match="the engine is on a CPU"):
        receive_weights(invitation(1, "nccl"), LAYOUT, places)


@pytest.mark.parametrize(("device", "backend"), [(None, "gloo"), (CPU, "nccl")])
def test_trainer_invites_to_nccl_if_it_sends_from_a_gpu(
    device: torch.device | None, backend: str
) -> None:
    broadcaster = Broadcaster(LAYOUT, host="127.0.0.1", timeout_s=7.0, device=device)
    generation = broadcaster._begin_generation(("a/0", "b/1"))
    generation.close()
    assert [sent.backend for sent in generation.invitations] == 3 * [backend]


def test_error_names_the_engines_that_did_not_come() -> None:
    store = HashStore()
    PrefixStore("key", store).set("rank 2 is here", "")
    members = ["a", "b", "c"]
    with pytest.raises(BroadcastError, match=r"a, c did not come within 0\.05 s"):
        WeightGroup(invitation(0, "gloo", 0.05), store, CPU, members)


def test_gloo_sends_the_memory_itself() -> None:
    """The copy of a bucket is for a GPU alone."""
    bucket = torch.zeros(4)
    group = broadcast_groups.GlooGroup.__new__(broadcast_groups.GlooGroup)
    assert group.to_send(bucket) is bucket
