"""A request of our weight loader is a whole update of SGLang's scheduler."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from invrl.engines.inside_sglang.atomic_weight_load import (
    WEIGHT_LOADER,
    leave_unpacked_modules,
    load_in_one_step,
)
from invrl.host import sglang_on_cpu


class Manager:
    """SGLang's manager of weight updates, as far as the scheduler asks it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sglang_on_cpu.make_importable()
        from sglang.srt.managers.scheduler_components import weight_updater

        manager = weight_updater.SchedulerWeightUpdaterManager
        for name in ("update_weights_from_tensor", "begin_weight_update"):
            monkeypatch.setattr(manager, name, getattr(manager, name))
        monkeypatch.setattr(torch.distributed, "barrier", lambda **_: None)
        load_in_one_step()
        self.calls: list[str] = []
        self.fails = False
        runner = types.SimpleNamespace(weight_updater=self)
        worker = types.SimpleNamespace(
            weight_update_runners=lambda: [("target", runner)],
            deserialize_own_rank=lambda payloads: payloads,
        )
        scheduler = types.SimpleNamespace(record_weight_version_change=lambda **_: None)
        nothing: Any = None
        self.manager: Any = manager(
            tp_worker=worker,
            draft_worker=None,
            tp_cpu_group=None,
            memory_saver_adapter=nothing,
            flush_cache=lambda **_: True,
            is_fully_idle=lambda **_: True,
            scheduler=scheduler,
        )

    def ask(self, load_format: str) -> Any:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[], load_format=load_format, flush_cache=False
        )
        return self.manager.update_weights_from_tensor(request)

    def begin(self) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        assert self.manager.begin_weight_update(BeginWeightUpdateReqInput()).success

    # ------------------------------------------------ what the manager calls of a model

    def begin_weight_update(self) -> None:
        self.calls.append("begin")

    def update_weights_from_tensor(self, **_: object) -> tuple[bool, str]:
        self.calls.append("load")
        if self.fails:
            raise RuntimeError("the load fails")
        return True, "Success"

    def end_weight_update(self, *, run_post_load: bool) -> None:
        self.calls.append("end")


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    return Manager(monkeypatch)


def test_request_of_the_loader_begins_and_ends_an_update(manager: Manager) -> None:
    for _ in range(2):
        assert manager.ask(WEIGHT_LOADER).success
    assert manager.calls == 2 * ["begin", "load", "end"]


def test_update_that_was_left_open_is_ended_first(manager: Manager) -> None:
    manager.begin()
    assert manager.ask(WEIGHT_LOADER).success
    assert manager.calls == ["begin", "end", "begin", "load", "end"]


def test_load_that_raises_leaves_no_update_open(manager: Manager) -> None:
    manager.fails = True
    with pytest.raises(RuntimeError, match="the load fails"):
        manager.ask(WEIGHT_LOADER)
    assert manager.calls == ["begin", "load", "end"]
    manager.begin()


def test_bucket_is_refused_outside_of_an_update(manager: Manager) -> None:
    assert not manager.ask("flattened_bucket").success
    assert manager.calls == []
    manager.begin()
    assert manager.ask("flattened_bucket").success
    assert manager.calls == ["begin", "load"]


def test_only_modules_with_packed_weights_are_moved_to_be_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sglang_on_cpu.make_importable()
    from sglang.srt.layers.quantization import unquant
    from sglang.srt.model_loader import loader

    moved: list[torch.nn.Module] = []

    @contextmanager
    def move(
        module: torch.nn.Module, target_device: torch.device
    ) -> Iterator[torch.nn.Module]:
        moved.append(module)
        yield module

    monkeypatch.setattr(loader, "device_loading_context", move)
    monkeypatch.setattr(unquant, "_is_cpu", False)  # as on a GPU
    leave_unpacked_modules()
    linear = torch.nn.Linear(4, 4)
    before = linear.weight
    values = before.detach().clone()
    methods: list[Any] = [
        unquant.UnquantizedLinearMethod(),
        unquant.UnquantizedEmbeddingMethod(),
        types.SimpleNamespace(
            process_weights_after_loading=lambda _: None,
            restore_weights_before_loading=lambda _: None,
        ),
    ]
    for method in methods:
        linear.quant_method = method
        with loader.device_loading_context(linear, torch.device("cpu")):
            method.restore_weights_before_loading(linear)
            method.process_weights_after_loading(linear)
    assert moved == [linear], "for the last method only"
    assert linear.weight is before, "the methods that are known do nothing"
    assert torch.equal(linear.weight, values)
