"""A trainer rank on its GPU of the plan: what its process is shown, and that it never
trains on the CPU instead."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from invrl.algorithms.config import AlgorithmConfig
from invrl.errors import TrainError
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.rank_settings import RankSettings
from invrl.train.ranks import rank_actor
from invrl.train.runtime import device
from invrl.train.trainer.train_actor import TrainActor

SETTINGS = RankSettings(
    rank=1,
    layout=ParallelLayout(data=2),
    master_addr="127.0.0.1",
    store_key="key",
    model_path="model",
    train=TrainConfig.model_validate({}),
    algorithm=AlgorithmConfig.model_validate({}),
    weight_dtype="bfloat16",
    visible_gpus="GPU-b,GPU-a",
)


def test_process_of_a_rank_is_shown_its_own_gpu_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_actor, "forget_keys", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    TrainActor(replace(SETTINGS, visible_gpus=None))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    TrainActor(SETTINGS)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"


def test_rank_that_cannot_use_its_gpu_does_not_train_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device.prepare()
    from invrl.train.parallel.process_group import join_process_group

    monkeypatch.setattr(device, "on_cuda", lambda: False)
    with pytest.raises(TrainError, match=r"rank 1 cannot use its GPU .*GPU-b"):
        join_process_group(SETTINGS, 1, None)


def test_rank_on_a_gpu_computes_on_the_host_with_its_share_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    with device.computes_on_host(before + 2):
        assert torch.get_num_threads() == before  # a rank on the CPU
    monkeypatch.setattr(device, "on_cuda", lambda: True)
    with device.computes_on_host(before + 2):
        assert torch.get_num_threads() == before + 2
    assert torch.get_num_threads() == before
