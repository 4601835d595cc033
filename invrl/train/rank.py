"""One trainer rank: the process group, the model, its optimizer, its weights. A plain class: tests run it
without Ray, `train_actor.py` is its shell.

Invariant: every rank makes the same calls in the same order (they meet in collectives); only `logprobs`,
`layout`, `stage`, `batches_trained` and `export_hugging_face` are one rank's own. `device.prepare()` runs
before Megatron is imported, so the imports that need it are inside."""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore

from invrl.interfaces import StagedWeights, StepResult, WeightLayout
from invrl.train import device
from invrl.train.grammar_masks import GrammarMasks
from invrl.train.group_store import (
    interface_towards,
    join_store,
    refuse_newcomers,
    refuse_strangers,
    serve_store,
)
from invrl.train.hf_config import read_hf_config
from invrl.train.megatron_args import parse_megatron_options
from invrl.train.packing import Row, Shard
from invrl.train.train_actor import RankSettings
from invrl.train.weights import export_weights, weight_specs
from invrl.types import WeightVersion
from invrl.weights.buckets import BucketSender
from invrl.weights.shared_memory import ArenaWriter

_TRANSPORTS = {"arena": ArenaWriter, "bucket": BucketSender}
"""The trainer's end of each weight transport; the engines' are in `engines/weight_receiver.py`."""


class TrainRank:
    """Raises ConfigError, TrainError, or torch's error if the other ranks do not come in time."""

    def __init__(self, settings: RankSettings, port: int, listener: socket.socket | None) -> None:
        """`port`: what rank 0 listens on, `listener`: rank 0's socket there."""
        device.prepare()
        _join(settings, port, listener)
        from invrl.train.checkpoint import Checkpoint
        from invrl.train.model import build_model
        from invrl.train.optimizer import distribute, make_schedule
        from invrl.train.step import TrainStep

        dtype: torch.dtype = getattr(torch, settings.train.train_dtype)
        options = parse_megatron_options(settings.megatron)
        self._settings = settings
        self._batches = 0
        self._config = read_hf_config(settings.model_path)
        train = settings.train
        algorithm = settings.algorithm
        build = partial(
            build_model,
            self._config,
            settings.model_path,
            dtype,
            options.transformer,
            max_logit_rows=train.max_trained_tokens_per_microbatch,
        )
        self._model = build()
        reference = None
        if algorithm.kl_coef > 0:
            reference = build()
            reference.requires_grad_(False)
        distributed, optimizer = distribute(self._model, train, options)
        schedule = make_schedule(optimizer, train)
        self._masks = GrammarMasks(settings.model_path, self._config.vocab_size)
        self._step = TrainStep(
            distributed,
            optimizer,
            schedule,
            reference,
            train=train,
            algorithm=algorithm,
            masks=self._masks,
        )
        self._checkpoint = Checkpoint(self._model, optimizer, schedule)
        self._served: torch.dtype = getattr(torch, settings.weight_dtype)

    def train(self, shard: Shard) -> StepResult:
        """One batch. Raises TrainError; then no weight has changed since the last mini-batch."""
        result = self._step.run(shard)
        self._batches += 1
        return result

    def batches_trained(self) -> int:
        """Whole ones since the start. Calls are made one at a time, so none is under way."""
        return self._batches

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Log-prob of each prompt's token t >= 1 given those before it, at temperature 1: [T-1] each."""
        ids = [np.asarray(prompt, np.int32) for prompt in prompts]
        rows = [Row(tokens_T=ids_T, wanted_N=np.arange(1, len(ids_T)), temperature=1.0) for ids_T in ids]
        return [array_T[1:] for array_T in self._step.logprobs(rows)]

    def token_logprobs(self, shard: Shard) -> list[NDArray[np.float32]]:
        """Of a shard's trained tokens under the current weights: one array [T] per sample, in its order."""
        samples = [sample for mini_batch in shard for sample in mini_batch.samples]
        return self._step.logprobs(self._masks.rows(samples))

    def layout(self) -> WeightLayout:
        return weight_specs(self._model, self._config, self._served)

    def stage(self, version: WeightVersion) -> StagedWeights:
        """Write the current weights, by Hugging Face name, where engines can take them. Those staged before
        stay whole until the next call."""
        return self._transport.stage(version, export_weights(self._model, self._config, self._served))

    @cached_property
    def _transport(self) -> ArenaWriter | BucketSender:
        """Only the rank that sends takes the memory."""
        return _TRANSPORTS[self._settings.transport](self.layout())

    def save_checkpoint(self, path: str) -> None:
        """Model, optimizer, schedule and RNG; all ranks together. The folder must be empty or new."""
        self._checkpoint.save(path)

    def load_checkpoint(self, path: str) -> None:
        self._checkpoint.load(path)

    def export_hugging_face(self, path: str) -> None:
        """A folder that plain transformers loads: weights in the training dtype, the chat template
        that the run uses, the rest as it came."""
        from invrl.train.checkpoint import export_hugging_face

        dtype: torch.dtype = getattr(torch, self._settings.train.train_dtype)
        settings = self._settings
        export_hugging_face(
            self._model, self._config, dtype, settings.model_path, path, chat_template=settings.chat_template
        )


def _join(settings: RankSettings, port: int, listener: socket.socket | None) -> None:
    """The process group and Megatron's groups over it; data parallel only, so far."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if device.on_cuda():
        torch.cuda.set_device(0)  # Ray shows each rank its own GPU only
    timeout = timedelta(seconds=settings.train.train_step_timeout_s)
    if listener is not None:
        store = serve_store(listener, world_size=settings.world_size, timeout=timeout)
    else:
        store = join_store(settings.master_addr, port, world_size=settings.world_size, timeout=timeout)
    # By default gloo and NCCL listen for their peers where the host name leads.
    interface = interface_towards(settings.master_addr)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    torch.distributed.init_process_group(
        device.backend(),
        store=PrefixStore(settings.store_key, store),
        rank=settings.rank,
        world_size=settings.world_size,
        timeout=timeout,
    )
    parallel_state.initialize_model_parallel()
    # On GPUs the store stays open: groups connect when they are first used.
    if listener is not None and not device.groups_connect_late():
        refuse_newcomers(listener)
        refuse_strangers(listener, members=settings.world_size)
    torch.manual_seed(settings.seed)
    model_parallel_cuda_manual_seed(settings.seed)
