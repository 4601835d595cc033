"""One trainer rank: the process group, the model, its optimizer and its weights.

`TrainRank` is a plain class: tests run it without Ray, and `train_actor.py` wraps it as
a Ray actor.

Invariant: every rank makes the same calls in the same order, because the ranks meet in
collectives. Only `layout`, `offer` and `batches_trained` run on one rank alone;
`logprobs`, `stage` and `export_hugging_face` run on all ranks that hold the first copy
of the model. `device.prepare()` must run before Megatron is imported, so modules that
import Megatron are imported inside functions.
"""

import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from invrl.algorithms.objectives.objectives import objective_needs
from invrl.families.hf_config import read_hf_config
from invrl.interfaces import StagedWeights, StepResult, WeightLayout
from invrl.train.batches.grammar_masks import GrammarMasks
from invrl.train.batches.micro_batch import TokenSequence
from invrl.train.batches.sharding import Shard
from invrl.train.cost.memory_budget import MemoryBudget
from invrl.train.cost.model_size import ComputeCost
from invrl.train.critic.critic_values import ValuesOfShard
from invrl.train.model.step_progress import StepPlace
from invrl.train.rank_settings import RankSettings
from invrl.train.ranks.saving_rank import SavingRank
from invrl.train.runtime import device
from invrl.train.runtime.megatron_args import MegatronOptions, parse_megatron_options
from invrl.train.weights.arena_staging import stage_first, stage_other
from invrl.train.weights.senders import Sender, make_sender
from invrl.types.file_entry import FileEntries
from invrl.types.metrics import Max, Metric
from invrl.types.weights import WeightVersion
from invrl.weights.checksums.checksums import HashTensors, whole_hash
from invrl.weights.config import (
    AdapterWeights,
    ArenaWeights,
    BucketWeights,
    FileWeights,
)
from invrl.weights.transports.arena import ArenaWriter
from invrl.weights.transports.broadcaster import Broadcaster
from invrl.weights.transports.buckets import (
    GPU_BUCKET_BYTES,
    BucketSender,
    bucket_names,
)
from invrl.weights.transports.file_server import WeightFileServer

if TYPE_CHECKING:
    from invrl.train.adapters.trained_adapter import TrainedAdapter
    from invrl.train.critic.critic import Critic
    from invrl.train.model.policy_model import PolicyModel
    from invrl.train.step.prepared_batch import BatchWithAdvantages, Prepared
    from invrl.train.step.train_step import TrainStep
    from invrl.train.weights.conversion import ReplicaWeights

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Weights = Iterator[tuple[str, torch.Tensor]]


class TrainRank(SavingRank):
    """One rank. The constructor raises ConfigError, TrainError, or torch's error if the
    other ranks do not come in time."""

    def __init__(
        self, settings: RankSettings, port: int, listener: socket.socket | None
    ) -> None:
        """`port` is the port on which rank 0 listens; `listener` is rank 0's socket
        there, else None."""
        self._config = read_hf_config(settings.model_path)
        needs = objective_needs(settings.algorithm)
        settings.layout.check(self._config)
        settings.train.check_model(self._config, needs, settings.algorithm.critic)
        device.prepare()
        if settings.train.deterministic:
            device.make_deterministic()
        from invrl.train.adapters.adapter import MergedWeights, attach_adapters
        from invrl.train.adapters.trained_adapter import TrainedAdapter
        from invrl.train.model.policy_model import PolicyModel, build_model
        from invrl.train.parallel.partitions import chunk_parameters
        from invrl.train.parallel.process_group import join_process_group
        from invrl.train.runtime.offloading import TrainingMemory
        from invrl.train.trainer.trainer_state import TrainerState
        from invrl.train.weights.conversion import ReplicaWeights, weight_specs

        join_process_group(settings, port, listener)
        train = settings.train
        folder = settings.model_path
        options = parse_megatron_options(settings.megatron)
        self._settings = settings
        self._train_dtype: torch.dtype = getattr(torch, train.train_dtype)
        self._served_dtype: torch.dtype = getattr(torch, settings.weight_dtype)
        chunks = build_model(
            PolicyModel,
            self._config,
            folder,
            self._train_dtype,
            settings.layout,
            options.transformer,
        )
        if train.lora is not None:
            attach_adapters(chunks, self._config, train.lora, settings.seed)
        self._weights = ReplicaWeights(
            chunk_parameters(chunks),
            self._config,
            settings.layout,
            offered=None if train.lora is None else MergedWeights(chunks),
        )
        # What is known of the folder is read now, because it may be gone later.
        self._trained_specs = weight_specs(self._config, folder, self._train_dtype)
        self._served_specs = weight_specs(self._config, folder, self._served_dtype)
        self._adapter: TrainedAdapter | None = None
        if train.lora is not None:
            self._adapter = TrainedAdapter(
                chunks,
                self._config,
                train.lora,
                settings.layout,
                base_path=folder,
                base_specs=self._trained_specs,
                checksum_path=settings.base_checksum_path,
            )
        self._masks = GrammarMasks(folder, self._config.vocab_size)
        shares_critic = (
            needs.values and train.critic_layout(settings.algorithm.critic) is None
        )
        self._memory_budget = MemoryBudget.of(
            train,
            Path(folder),
            frozen_models=train.computes_reference(needs) + bool(settings.teacher_path),
            reference_moves=settings.algorithm.reference_moves,
            reference_is_averaged=settings.algorithm.reference.ema is not None,
            has_critic=shares_critic,
            compares_routers=needs.router_shift,
            served_dtype=settings.weight_dtype,
            megatron=settings.megatron,
            copies_checkpoints=False,  # until the first copy
            on_cuda=device.on_cuda(),
            arena_on_gpu=settings.arena_on_gpu,
            sends_buckets=isinstance(settings.weights, BucketWeights),
        )
        self._largest_micro_batch = 0
        self._num_batches = 0
        critic = None
        if shares_critic:
            from invrl.train.critic.critic import make_critic

            critic = make_critic(settings, self._config, options)
        self._step = self._build_step(chunks, critic, options)
        state = TrainerState(
            chunks,
            self._step.optimizer,
            self._step.schedule,
            self._step,
            self._adapter,
        )
        super().__init__(state, state.load)
        self._training_memory = TrainingMemory(
            [*self._step.chunks, *(critic.chunks if critic else ())],
            [self._step.optimizer, *([critic.optimizer] if critic else ())],
        )
        self._prepared: Prepared | None = None
        self._with_advantages: BatchWithAdvantages | None = None
        self.model_written: Future[FileEntries] = Future()
        """Done when the model copied last by `copy_model` is written."""

    def _build_step(
        self,
        chunks: Sequence["PolicyModel"],
        critic: "Critic | None",
        options: MegatronOptions,
    ) -> "TrainStep":
        """Build the training step over this rank's chunks, with their optimizer, the
        frozen models and the experts' parts."""
        from invrl.train.layers.expert_load import ExpertRouters
        from invrl.train.layers.routing_replay import RoutingRecorder
        from invrl.train.model.optimizer import distribute, make_schedule
        from invrl.train.model.reference import BaseReference, FrozenReference
        from invrl.train.step.train_step import TrainStep

        settings = self._settings
        needs = objective_needs(settings.algorithm)
        train = settings.train
        experts = self._config.experts
        routing = None
        if experts is not None and (
            train.routing_replay != "none" or needs.router_shift
        ):
            routing = RoutingRecorder(
                self._config.num_hidden_layers,
                experts,
                replays=train.routing_replay == "trainer",
                keeps_scores=needs.router_shift,
            )
            for chunk in chunks:
                chunk.routing = routing
        frozen = partial(
            FrozenReference, chunks, self._config, placement=train.reference_placement
        )
        reference = None
        if needs.reference and train.lora is not None:
            reference = BaseReference(chunks)
        elif needs.reference:
            reference = frozen(
                settings.reference_path or settings.model_path,
                is_averaged=settings.algorithm.reference.ema is not None,
            )
        teacher = None
        if settings.teacher_path:
            teacher = frozen(settings.teacher_path)
        distributed, optimizer = distribute(
            chunks, train, options, host_threads=settings.host_threads
        )
        expert_routers = None
        if experts is not None:
            expert_routers = ExpertRouters(
                chunks,
                self._config,
                bias_update_rate=train.moe_router_bias_update_rate or 0.0,
            )
        return TrainStep(
            distributed,
            optimizer,
            make_schedule(optimizer, train),
            reference,
            teacher,
            critic=critic,
            layout=settings.layout,
            train=train,
            algorithm=settings.algorithm,
            cost=ComputeCost.of_model(Path(settings.model_path)),
            masks=self._masks,
            routing=routing,
            expert_routers=expert_routers,
        )

    def sleep(self) -> int:
        """Release the memory that only training needs, until `wake`: engines on this
        rank's device take it. The rank's other GPU memory is allocated before,
        including the arena. Returns the bytes that are then free on the device."""
        sends_buckets = isinstance(self._settings.weights, BucketWeights)
        if self._weights.collects and (self._settings.arena_on_gpu or sends_buckets):
            _ = self._transport
        self._training_memory.offload()
        return self._log_memory("sleeps")

    def wake(self) -> int:
        """Take that memory again. Returns the bytes that were free on the device
        before."""
        free = self._log_memory("wakes")
        self._training_memory.restore()
        return free

    def _log_memory(self, change: str) -> int:
        free = device.free_memory()
        used = device.used_memory()
        logger.info(
            "the rank %s: it holds %.2f GB, %.2f GB are free",
            change,
            used / 1e9,
            free / 1e9,
        )
        return free

    def train(self, shard: Shard) -> StepResult:
        """Train one batch. If it raises TrainError, no weight has changed since the
        last mini-batch."""
        result = self._step.run(shard)
        self._num_batches += 1
        return self._reported(result)

    def prepare(self, shard: Shard) -> None:
        """Compute the first part of a batch with a critic on separate ranks;
        `compute_advantages` and `learn` follow. The results stay on this rank."""
        self._prepared = self._step.prepare(shard)

    def compute_advantages(self, values: ValuesOfShard) -> ValuesOfShard:
        """Compute the second part: advantages from the critic's values, which stay on
        this rank, and the returns that the critic learns."""
        assert self._prepared is not None, "prepare comes first"
        self._with_advantages = self._step.compute_advantages(self._prepared, values)
        return [
            list(targets.returns)
            for targets in self._with_advantages.targets
            if targets is not None
        ]

    def learn(self, *, critic_learns_alone: bool) -> StepResult:
        """Compute the third part. Returns like `train`."""
        assert self._prepared is not None, "prepare comes first"
        assert self._with_advantages is not None, "compute_advantages comes first"
        result = self._step.learn(
            self._prepared,
            self._with_advantages,
            critic_learns_alone=critic_learns_alone,
        )
        self._prepared = None
        self._with_advantages = None
        self._num_batches += 1
        return self._reported(result)

    def _reported(self, result: StepResult) -> StepResult:
        """Add the used memory. The tokens' records are those of the rank that reports
        for its replica; the others have the same ones."""
        layout = self._settings.layout
        rank = self._settings.rank
        token_records = result.token_records
        if rank != layout.reporter(layout.coordinates(rank).data):
            token_records = ()
        metrics = {**result.metrics, **self._memory_metrics(result)}
        return replace(result, metrics=metrics, token_records=token_records)

    def place(self) -> StepPlace:
        """Return the current work. Any thread may call it."""
        return self._step.progress.place

    def evaluate(self, shard: Shard) -> dict[str, Metric]:
        """See `TrainStep.evaluate`."""
        return self._step.evaluate(shard)

    def _memory_metrics(self, result: StepResult) -> dict[str, Metric]:
        """Return the memory of the rank that has used most, with the estimate for the
        largest micro-batch so far."""
        from invrl.train.parallel.process_group import max_over_ranks

        largest_micro_batch = int(
            max_over_ranks(result.metrics["largest_micro_batch"].value())
        )
        self._largest_micro_batch = max(self._largest_micro_batch, largest_micro_batch)
        return {
            "peak_memory_gb": Max(max_over_ranks(device.peak_memory()) / 1e9),
            "estimated_memory_gb": Max(
                self._memory_budget.largest(self._largest_micro_batch).total / 1e9
            ),
        }

    def batches_trained(self) -> int:
        """Return the number of whole batches trained since the start. Calls run one at
        a time, so none is under way."""
        return self._num_batches

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Return the log-prob of each prompt's token t >= 1 given those before it, at
        temperature 1: [T-1] each."""
        sequences: list[TokenSequence] = []
        for prompt in prompts:
            tokens_T = np.asarray(prompt, np.int32)
            sequences.append(
                TokenSequence(
                    tokens_T=tokens_T,
                    wanted_N=np.arange(1, len(tokens_T)),
                    temperature=1.0,
                )
            )
        return [
            logprobs_T[1:]
            for logprobs_T in self._step.logprob_passes.logprobs(sequences)
        ]

    def token_logprobs(self, shard: Shard) -> list[NDArray[np.float32]]:
        """Return log-probs of a shard's trained tokens under the current weights: one
        array [T] per sample, in the shard's order."""
        samples = [sample for mini_batch in shard for sample in mini_batch.samples]
        return self._step.logprob_passes.logprobs(self._masks.sequences(samples))

    def layout(self) -> WeightLayout:
        adapter = self._sent_adapter
        if adapter is not None:
            return adapter.served_layout(self._served_dtype)
        return self._served_specs

    @property
    def _sent_adapter(self) -> "TrainedAdapter | None":
        """The adapter if engines get it, instead of merged weights."""
        if isinstance(self._settings.weights, AdapterWeights):
            assert self._adapter is not None, "[lora] is set: contradictions.py"
            return self._adapter
        return None

    def stage(self, version: WeightVersion) -> StagedWeights | None:
        """Write the current weights, under Hugging Face names, where the engines can
        read them. The previously staged weights stay intact until the next call. None
        on the ranks that only send their parts."""
        first, *others = self._weights.ranks
        if others and isinstance(self._settings.weights, ArenaWeights):
            parts = self._weights.own_parts(self._served_dtype)
            if not self._weights.collects:
                stage_other(self.layout(), parts, first, self._slot_hash)
                return None
            assert isinstance(self._transport, ArenaWriter), (
                "the transport is the arena"
            )
            return stage_first(self._transport, version, self.layout(), parts, others)
        adapter = self._sent_adapter
        sent = adapter.served if adapter is not None else self._weights.export
        staged = self._collect(
            sent(self._served_dtype),
            lambda weights: self._transport.stage(version, weights),
        )
        if staged is None:
            return None
        if self._file_server is not None:
            staged = replace(staged, handle=self._file_server.served(staged.handle))
        return staged

    @property
    def _slot_hash(self) -> HashTensors:
        several_ranks = self._settings.engine_ranks > 1
        return whole_hash(adds_up=several_ranks or device.on_cuda())

    def bucket(self, index: int, copies: int) -> list[str] | None:
        """Return a bucket of the current weights as `BucketSender.bucket` does, on a
        GPU. None on the ranks that only send their parts."""
        names = bucket_names(self.layout(), GPU_BUCKET_BYTES)[index]

        def serialise(weights: Weights) -> list[str]:
            assert isinstance(self._transport, BucketSender), "nobody else asks"
            return self._transport.bucket(index, weights, copies)

        weights = self._weights.export(self._served_dtype, names=names)
        return self._collect(weights, serialise)

    def offer(self, version: WeightVersion, engines: Sequence[str]) -> list[str]:
        """See `Broadcaster.offer`. Only with the transport `collective`, on the rank
        that has staged."""
        broadcaster = self._transport
        assert isinstance(broadcaster, Broadcaster), (
            "other transports need one end at a time"
        )
        return broadcaster.offer(version, engines)

    @cached_property
    def _file_server(self) -> WeightFileServer | None:
        """File server of the weights. Raises OSError if the address is not one of this
        machine."""
        weights = self._settings.weights
        if not isinstance(weights, FileWeights) or not weights.host:
            return None
        return WeightFileServer(Path(self._settings.weight_folder), weights.host)

    @cached_property
    def _transport(self) -> Sender:
        """Created at the first use, so that only the rank that sends allocates its
        memory."""
        adapter = self._sent_adapter
        if adapter is not None:
            return adapter.folders(self.layout(), Path(self._settings.weight_folder))
        return make_sender(self._settings, self.layout())

    def copy_model(self, path: str) -> None:
        """Copy the weights, and begin to write them like `export_hugging_face`, during
        training. `model_written` gets the result."""
        copies: deque[tuple[str, torch.Tensor]] = deque()
        for name, tensor in self._saved_weights.export(self._train_dtype):
            copies.append((name, tensor.detach().to("cpu", copy=True)))
        if not self._weights.collects:
            self.model_written = Future()
            self.model_written.set_result({})
            return
        # each is freed once it is written
        weights = (copies.popleft() for _ in range(len(copies)))
        self.model_written = self._writer.submit(self._write_model, path, weights)

    @property
    def _saved_weights(self) -> "ReplicaWeights":
        """Weights that a checkpoint has as a Hugging Face or PEFT folder."""
        return self._weights if self._adapter is None else self._adapter.weights

    def copy_checkpoint(self, path: str) -> None:
        self._memory_budget = replace(self._memory_budget, copies_checkpoints=True)
        super().copy_checkpoint(path)

    def export_hugging_face(self, path: str) -> FileEntries:
        """Write a folder that plain transformers loads: weights in the training dtype,
        the chat template that the run uses, and the other files unchanged. Of a run
        that trains an adapter, a PEFT folder. One rank writes; the others send their
        parts. Returns the entries of the files with weights, on the rank that
        writes."""
        weights = self._saved_weights.export(self._train_dtype)
        return self._collect(weights, partial(self._write_model, path)) or {}

    def _write_model(self, path: str, weights: Weights) -> FileEntries:
        if self._adapter is not None:
            return self._adapter.write(
                weights, path, chat_template=self._settings.chat_template
            )
        from invrl.train.weights.hf_export import export_hugging_face

        return export_hugging_face(
            weights,
            self._trained_specs,
            self._settings.model_path,
            path,
            chat_template=self._settings.chat_template,
            max_shard_bytes=self._settings.train.max_shard_gb * 1e9,
        )

    def _collect(
        self, weights: Weights, write: Callable[[Weights], Result]
    ) -> Result | None:
        """Write exported weights on the rank that collects them. None on the others,
        which send their parts."""
        if not self._weights.collects:
            for name, _ in weights:
                raise AssertionError(f"{name} was collected on a rank that only sends")
            return None
        try:
            return write(weights)
        except Exception:
            # On a full disk, for example: the other ranks would wait until they have
            # sent all of them.
            deque(weights, maxlen=0)
            raise
