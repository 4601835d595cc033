"""Processes that trainer ranks are built in, again and again: importing Megatron costs
more than any test does. A test asks for a layout of ranks through the `pool` fixture of
`conftest.py`.

Run as a script it is their parent: it imports once, and forks them. Each forks a child
for each build, which answers calls over a socket until the next build or until the
socket closes. (A rank cannot be taken apart inside its process, because something in
C++ holds the model and with it twenty process groups. Their threads wake every few
milliseconds: after forty builds they took a core.) A rank keeps the gradients (before
clipping) and weights of every optimizer step, by Hugging Face name, so that a test can
compute the same step otherwise.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import importlib
import io
import os
import resource
import shutil
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from invrl.algorithms.config import AlgorithmConfig
from invrl.errors import DeadlineError
from invrl.host.processes.descendants import die_with_parent
from invrl.host.processes.process import ServerProcess, random_key
from invrl.interfaces import StagedWeights, StepResult, WeightLayout
from invrl.train.batches.micro_batch import TokenSequence
from invrl.train.batches.sharding import Shard, shard_batch
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.rank_settings import RankSettings
from invrl.types.batches import TrainBatch
from invrl.types.file_entry import FileEntries
from invrl.types.metrics import Metric, merge
from invrl.types.weights import WeightVersion

CALL_S = 200.0  # a busy machine imports Megatron and builds a rank in less
IMPORTED_BY_RANKS = (
    "invrl.algorithms.objectives.distillation",
    "invrl.algorithms.objectives.preferences",
    "invrl.algorithms.objectives.sft",
    "invrl.algorithms.policy_loss.losses",
    "invrl.train.critic.critic",
    "invrl.train.runtime.offloading",
    "invrl.train.trainer.train_rank",
    "invrl.train.trainer.trainer_state",
    "invrl.train.weights.hf_export",
)
"""Modules that a rank imports while it is built or called."""

Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of a rank: the gradients it was given, and the weights after
    it."""

    gradients: Arrays
    weights: Arrays


# -------------------------------------------------------------- in the test's process


class RankPool:
    """The processes, forked when first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parent: tuple[ServerProcess, Connection] | None = None
        self._connections: list[Connection] = []

    def build(
        self,
        model: Path,
        *,
        ranks: int = 1,
        layout: ParallelLayout | None = None,
        train: TrainConfig | None = None,
        algorithm: AlgorithmConfig | None = None,
        megatron: dict[str, Any] | None = None,
        chat_template: str = "",
        reference: Path | None = None,
        teacher: Path | None = None,
        weights: dict[str, Any] | None = None,
    ) -> Trainer:
        """Trainer ranks over `model`; those built before them are gone. Without a
        layout all `ranks` are data-parallel."""
        layout = layout or ParallelLayout(data=ranks)
        ranks = layout.world_size
        while len(self._connections) < ranks:
            self._connections.append(self._fork())
        train = train or TrainConfig(train_dtype="float32")
        connections = self._connections[:ranks]
        everyone = ParallelLayout(data=len(self._connections))
        Trainer(self._connections, everyone).each("renew")
        [port] = Trainer(connections[:1], ParallelLayout()).each("listen")
        store_key = random_key()
        trainer = Trainer(connections, layout)
        trainer.call(
            "build",
            [
                (
                    RankSettings(
                        rank=rank,
                        layout=layout,
                        master_addr="127.0.0.1",
                        store_key=store_key,
                        model_path=str(model),
                        reference_path=str(reference or ""),
                        teacher_path=str(teacher or ""),
                        chat_template=chat_template,
                        train=train,
                        algorithm=algorithm or AlgorithmConfig(),
                        weight_dtype=train.train_dtype,
                        megatron=megatron or {},
                        **(weights or {}),
                    ),
                    port,
                )
                for rank in range(ranks)
            ],
        )
        return trainer

    def _fork(self) -> Connection:
        if self._parent is None:
            self._parent = self._start_parent()
        _, orders = self._parent
        address = str(self._folder / f"{len(self._connections)}.socket")
        with listening(address) as listener:
            orders.send(address)
            return listener.accept()

    def _start_parent(self) -> tuple[ServerProcess, Connection]:
        address = str(self._folder / "parent.socket")
        with listening(address) as listener:
            process = ServerProcess(
                "parent of the rank processes",
                [sys.executable, __file__, address],
                log=self._folder / "ranks.log",
                env={
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
            )
            return process, listener.accept()

    def stop(self) -> None:
        for connection in self._connections:
            connection.close()
        if self._parent is not None:
            process, orders = self._parent
            orders.close()
            process.stop()


def listening(address: str) -> Listener:
    """A socket for one process that shall connect in time."""
    listener = Listener(address, "AF_UNIX")
    listener._listener._socket.settimeout(CALL_S)  # type: ignore[attr-defined]
    return listener


class Trainer:
    """All ranks of one build. What a rank raises is raised here."""

    def __init__(
        self, connections: Sequence[Connection], layout: ParallelLayout
    ) -> None:
        self._connections = connections
        self.layout = layout

    def part(self, ranks: Sequence[int]) -> Trainer:
        """These ranks alone."""
        return Trainer([self._connections[rank] for rank in ranks], self.layout)

    def call(self, method: str, arguments: Sequence[object]) -> list[Any]:
        """`method(argument)` on each rank."""
        for connection, argument in zip(self._connections, arguments, strict=True):
            connection.send((method, argument))
        answers: list[Any] = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(CALL_S):
                raise DeadlineError(f"rank {rank} to answer {method}", CALL_S)
            answers.append(connection.recv())
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def each(self, method: str, argument: object = None) -> list[Any]:
        return self.call(method, [argument] * len(self._connections))

    def train(self, batch: TrainBatch, *, steps: int = 1) -> dict[str, Metric]:
        """Metrics merged over replicas."""
        return self.train_shards(
            shard_batch(batch, ranks=self.layout.data, steps=steps)
        )

    def train_shards(self, shards: Sequence[Shard]) -> dict[str, Metric]:
        """`shards`: one per replica."""
        results: list[StepResult] = self.call("train", self._by_rank(shards))
        return merge(
            results[self.layout.reporter(data)].metrics
            for data in range(self.layout.data)
        )

    def train_records(self, batch: TrainBatch, *, steps: int = 1) -> list[StepResult]:
        """Trains the batch. What each rank returns, in rank order."""
        return self.call(
            "train",
            self._by_rank(shard_batch(batch, ranks=self.layout.data, steps=steps)),
        )

    def evaluate(self, batch: TrainBatch) -> dict[str, Metric]:
        """Metrics merged over replicas."""
        shards = shard_batch(batch, ranks=self.layout.data, steps=1)
        measured = self.call("evaluate", self._by_rank(shards))
        return merge(
            measured[self.layout.reporter(data)] for data in range(self.layout.data)
        )

    def token_logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """[T] per sample, in the order of the replicas' shards."""
        return self._of_tokens("token_logprobs", batch)

    def _of_tokens(self, method: str, batch: TrainBatch) -> list[NDArray[np.float32]]:
        shards = shard_batch(batch, ranks=self.layout.data, steps=1)
        answers = self.call(method, self._by_rank(shards))
        of_replicas = [
            answers[self.layout.reporter(data)] for data in range(self.layout.data)
        ]
        return [array for replica in of_replicas for array in replica]

    def _by_rank(self, shards: Sequence[Shard]) -> list[Shard]:
        ranks = range(self.layout.world_size)
        return [shards[self.layout.coordinates(rank).data] for rank in ranks]

    def steps(self) -> list[Step]:
        """The optimizer steps of the first replica since the last call."""
        return self.each("steps")[0]

    def critic_steps(self) -> list[Step]:
        """As `steps`, of the critic; its value head has the name "value_head"."""
        answers = self.each("critic_steps")
        whole: list[Step] = []
        for body, head in zip(
            answers[0], answers[self.layout.reporter(0)], strict=True
        ):
            whole.append(
                Step(
                    gradients=body.gradients | head.gradients,
                    weights=body.weights | head.weights,
                )
            )
        return whole

    def critic_weights(self) -> Arrays:
        answers = self.each("critic_weights")
        return answers[0] | answers[self.layout.reporter(0)]

    def values(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """As `token_logprobs`: the critic's values."""
        return self._of_tokens("token_values", batch)

    def optimizer_state(self, name: str) -> Arrays:
        """Of the first replica: Adam's moment "exp_avg" or "exp_avg_sq" of every
        parameter."""
        return self.each("optimizer_state", name)[0]

    def weights(self) -> Arrays:
        return self.each("weights")[0]

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        return self.each("logprobs", prompts)[self.layout.reporter(0)]


# ---------------------------------------------------------------- in a rank's process


class RankProcess:
    """What a test can ask of one process."""

    def __init__(self) -> None:
        from invrl.train.runtime import device

        device.prepare()
        for module in IMPORTED_BY_RANKS:
            importlib.import_module(module)
        from invrl.train.critic import critic
        from invrl.train.step import train_step as step

        apply = step.apply_gradients
        self._apply = apply
        self._steps: list[Step] = []

        def recording(optimizer: Any) -> float:
            self._share_gradients(self._rank._step.chunks)
            gradients = self._by_name(lambda parameter: parameter.main_grad)
            norm = apply(optimizer)
            self._steps.append(Step(gradients=gradients, weights=self.weights()))
            return norm

        def recording_critic(optimizer: Any) -> float:
            self._share_gradients(self._rank._step.critic.chunks)
            gradients = self._of_critic(lambda parameter: parameter.main_grad)
            norm = apply(optimizer)
            self._critic_steps.append(
                Step(gradients=gradients, weights=self.critic_weights())
            )
            return norm

        step.apply_gradients = recording
        critic.apply_gradients = recording_critic
        self._critic_steps: list[Step] = []
        self._critic_parts: Any = None
        self._rank: Any = None
        self._listener: Any = None
        self._open = io.open

    def _by_name(self, of: Callable[[Any], Any]) -> Arrays:
        """By Hugging Face name, on the first rank of each replica; empty on the
        others."""
        import torch

        weights = self._rank._saved_weights  # of the model, or of its adapter
        values = {name: of(parameter) for name, parameter in self._trained().items()}
        tensors = weights.export(torch.float32, values)
        # Cloned, because the memory of a tensor that numpy has seen cannot be resized
        # any more.
        return {name: tensor.clone().numpy() for name, tensor in tensors}

    def _trained(self) -> dict[str, Any]:
        """This rank's parameters without the buffers, by their names in the whole
        model."""
        import torch

        own = self._rank._saved_weights._own_parameters
        return {
            name: tensor
            for name, tensor in own.items()
            if isinstance(tensor, torch.nn.Parameter)
        }

    def _of_critic(self, of: Callable[[Any], Any]) -> Arrays:
        """By Hugging Face name, on the first rank of each replica; the head where it
        is."""
        import torch

        from invrl.train.parallel.partitions import HEAD

        own = dict(self._critic_parts._own_parameters)
        head = own.pop(HEAD, None)
        values = {
            name: of(tensor)
            for name, tensor in own.items()
            if isinstance(tensor, torch.nn.Parameter)
        }
        tensors = self._critic_parts.export(torch.float32, values)
        arrays = {name: tensor.clone().numpy() for name, tensor in tensors}
        if head is not None:
            arrays["value_head"] = of(head).detach().float().clone().numpy()
        return arrays

    def _share_gradients(self, chunks: Sequence[Any]) -> None:
        """The distributed optimizer leaves each data-parallel rank with its own share
        of the sums."""
        import torch

        if not self._is_sharded():
            return
        for buffer in self._buffers(chunks):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shares = list(bucket.grad_data.chunk(group.size()))
                torch.distributed.all_gather(
                    shares, shares[group.rank()].clone(), group=group
                )

    def _is_sharded(self) -> bool:
        return self._rank._step.chunks[0].ddp_config.use_distributed_optimizer

    def _buffers(self, chunks: Sequence[Any]) -> list[Any]:
        return [
            buffer
            for chunk in chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]

    def buckets(self, _: None) -> int:
        """In how many parts the gradients of the rank's first chunk are reduced."""
        return len(self._rank._step.chunks[0].bucket_groups)

    def optimizer_state(self, name: str) -> Arrays:
        import torch

        parts = self._rank._step.optimizer.chained_optimizers

        def whole(parameter: Any) -> Any:
            if not self._is_sharded():
                # Beside bfloat16 parameters Megatron has master weights.
                parameter = getattr(parameter, "main_param", parameter)
                [state] = [
                    part.optimizer.state[parameter]
                    for part in parts
                    if _trains(part, parameter)
                ]
                return state[name]
            state = torch.zeros(parameter.numel())
            for part in parts:
                if parameter in part.model_param_gbuf_map:
                    share = part._get_model_param_range_map(parameter)["param"]
                    own = part._get_main_param_and_optimizer_states(parameter)[name]
                    state[share.start : share.end] = own.view(-1)
            [buffer] = [
                buffer
                for buffer in self._buffers(self._rank._step.chunks)
                if parameter in buffer.param_index_map
            ]
            torch.distributed.all_reduce(state, group=buffer.data_parallel_group)
            return state.view(parameter.shape)

        return self._by_name(whole)

    def inject(self, folder: str) -> float:
        """An optimizer step with the tensors of a Hugging Face folder as gradients; the
        gradient's norm."""
        import torch

        from invrl.train.weights.conversion import load_weights

        rank = self._rank
        parameters = self._trained()
        weights = [parameter.detach().clone() for parameter in parameters.values()]
        load_weights(parameters, rank._config, folder)
        with torch.no_grad():
            for parameter, weight in zip(parameters.values(), weights, strict=True):
                parameter.main_grad.copy_(parameter)
                parameter.copy_(weight)
        return self._apply(rank._step.optimizer)

    def leave_unreduced(self, name: str) -> None:
        """Plants an error: the gradient of this parameter is not summed over
        tensor-parallel ranks."""
        self._rank._weights._own_parameters[name].sequence_parallel = False

    def leave_experts_unreduced(self, _: None) -> None:
        """Plants an error: the experts' gradients are not summed over the ranks that
        have them."""
        for chunk in self._rank._step.chunks:
            chunk.expert_parallel_bucket_groups.clear()

    def compute_experts_one_by_one(self, _: None) -> None:
        """By Megatron's own module."""
        from megatron.core.transformer.moe.experts import SequentialMLP

        from invrl.train.layers.experts import Experts

        Experts.forward = SequentialMLP.forward

    def copied_stacks(self, _: None) -> list[bool]:
        """Of each projection of each layer with experts: whether the weights are copied
        to be multiplied."""
        from invrl.train.layers.experts import Experts
        from invrl.train.layers.grouped_linear import stacked

        copied: list[bool] = []
        for chunk in self._rank._step.chunks:
            for layer in (
                module for module in chunk.modules() if isinstance(module, Experts)
            ):
                for name in ("linear_fc1", "linear_fc2"):
                    weights = [
                        getattr(expert, name).weight for expert in layer.local_experts
                    ]
                    copied.append(stacked(weights).data_ptr() != weights[0].data_ptr())
        return copied

    def weights_in_reference(self, _: None) -> Arrays:
        """The model's weights between two layers of the reference's pass."""
        with self._rank._step.reference.in_place():
            return self.weights()

    def fail_in_reference(self, layer: str) -> bool:
        """Whether the reference's pass failed in this module, which is made to."""
        [chunk] = self._rank._step.chunks
        module = chunk.module.get_submodule(layer)
        handle = module.register_forward_pre_hook(_raise)
        try:
            with self._rank._step.reference.in_place():
                self._rank.logprobs([[1, 2, 3]])
        except ZeroDivisionError:
            return True
        finally:
            handle.remove()
        return False

    def reference_bytes(self, _: None) -> int:
        """Of all tensors that the reference keeps."""
        reference = self._rank._step.reference
        exchanges = [reference._rest, *(exchange for _, exchange in reference._layers)]
        return sum(
            weight.nbytes
            for exchange in exchanges
            for weight in exchange.weights.values()
        )

    def largest_moment(self, _: None) -> float:
        """Of Adam's, over all parameters of the policy."""
        states = [
            state
            for part in self._rank._step.optimizer.chained_optimizers
            for state in part.optimizer.state.values()
        ]
        return max(
            float(state[name].abs().max())
            for state in states
            for name in ("exp_avg", "exp_avg_sq")
        )

    def forward_passes(self, shard: Shard) -> int:
        """Of the decoder in one training step."""
        passes: list[None] = []
        [chunk] = self._rank._step.chunks
        handle = chunk.module.decoder.register_forward_hook(
            lambda *_: passes.append(None)
        )
        try:
            self._rank.train(shard)
        finally:
            handle.remove()
        return len(passes)

    def bucket_bytes(self, size: int) -> None:
        from invrl.train.weights import conversion as weights

        weights.BUCKET_BYTES = size

    def exported_twice(self, bucket_bytes: int) -> tuple[dict[str, str], ...]:
        """Return the checksums of all weights, exported at once, and by the names of
        one bucket after the other."""
        import torch

        from invrl.weights.tensors.tensor_spec import checksum
        from invrl.weights.transports.buckets import bucket_names

        weights = self._rank._weights
        at_once = {
            name: checksum(tensor) for name, tensor in weights.export(torch.float32)
        }
        in_buckets: dict[str, str] = {}
        for names in bucket_names(self._rank.layout(), bucket_bytes):
            bucket = dict(weights.export(torch.float32, names=names))
            assert list(bucket) == (names if bucket else [])
            in_buckets |= {name: checksum(tensor) for name, tensor in bucket.items()}
        return at_once, in_buckets

    def listen(self, _: None) -> int:
        from invrl.host.network.rendezvous import listen

        self._listener = listen("127.0.0.1")
        return self._listener.getsockname()[1]

    def build(self, given: tuple[RankSettings, int]) -> None:
        from invrl.train.trainer.train_rank import TrainRank

        settings, port = given
        self._rank = TrainRank(
            settings, port, self._listener if settings.rank == 0 else None
        )
        if self._rank._step.critic is not None:
            from invrl.train.critic.critic_model import critic_shape
            from invrl.train.parallel.partitions import chunk_parameters
            from invrl.train.weights.conversion import ReplicaWeights

            shape = critic_shape(self._rank._config)
            self._critic_parts = ReplicaWeights(
                chunk_parameters(self._rank._step.critic.models),
                shape,
                settings.layout,
            )

    def constants(self, values: dict[str, int]) -> dict[str, int]:
        """Sets constants of modules of `invrl.train`
        ("batches.packing.DENSE_TREE_TOKENS"); gives those that they replace."""
        replaced: dict[str, int] = {}
        for name, value in values.items():
            module_name, _, constant = name.rpartition(".")
            module = importlib.import_module(f"invrl.train.{module_name}")
            replaced[name] = getattr(module, constant)
            setattr(module, constant, value)
        return replaced

    def has_imported(self, module: str) -> bool:
        return module in sys.modules

    def pid(self, _: None) -> int:
        return os.getpid()

    def sleep(self, _: None) -> int:
        return self._rank.sleep()

    def wake(self, _: None) -> int:
        return self._rank.wake()

    def gradient_bytes(self, _: None) -> int:
        """Of the memory that gradients have."""
        chunks = list(self._rank._step.chunks)
        if self._rank._step.critic is not None:
            chunks += self._rank._step.critic.chunks
        return sum(
            buffer.grad_data.untyped_storage().nbytes()
            for buffer in self._buffers(chunks)
        )

    def moved_bytes(self, _: None) -> int:
        """Of what goes to the host's memory while the rank sleeps."""
        return sum(state.nbytes for state in self._rank._training_memory._states())

    def stage_gradients(self, num_bytes: int) -> int:
        """From now on gradients of so many bytes are in main memory together; gives the
        number of such groups of the optimizer that has fewest."""
        from invrl.train.runtime import offloaded_optimizer as module

        module.STAGED_GRADIENT_BYTES = num_bytes
        counts: list[int] = []
        for part in self._rank._step.optimizer.chained_optimizers:
            if not isinstance(part, module.OffloadedOptimizer):
                continue  # it has no parameter on this rank
            shares = [share for group in part._groups for share in group]
            part._groups = list(module._grouped(shares))
            counts.append(len(part._groups))
        return min(counts)

    def train(self, shard: Shard) -> StepResult:
        return self._rank.train(shard)

    def evaluate(self, shard: Shard) -> dict[str, Metric]:
        return self._rank.evaluate(shard)

    def steps(self, _: None) -> list[Step]:
        steps, self._steps[:] = list(self._steps), []
        return steps

    def length_lambda(self, _: None) -> float:
        return self._rank._step.adapted.state["LearnedExponent"]["length_lambda"]

    def critic_steps(self, _: None) -> list[Step]:
        steps, self._critic_steps[:] = list(self._critic_steps), []
        return steps

    def critic_weights(self, _: None = None) -> Arrays:
        return self._of_critic(lambda parameter: parameter)

    def weights(self, _: None = None) -> Arrays:
        return self._by_name(lambda parameter: parameter)

    def merged_weights(self, _: None = None) -> Arrays:
        """What engines would get in float32, on the first rank of each replica."""
        import torch

        tensors = self._rank._weights.export(torch.float32)
        return {name: tensor.clone().numpy() for name, tensor in tensors}

    def merged_checksums(self, _: None = None) -> dict[str, str]:
        """Of what engines would get."""
        from invrl.weights.tensors.tensor_spec import checksum

        tensors = self._rank._weights.export(self._rank._served_dtype)
        return {name: checksum(tensor) for name, tensor in tensors}

    def base_checksums(self, _: None = None) -> dict[str, str]:
        """Of this rank's frozen parameters."""
        from invrl.weights.tensors.tensor_spec import checksum

        own = self._rank._weights._own_parameters
        return {name: checksum(tensor) for name, tensor in own.items()}

    def trained_numbers(self, _: None = None) -> dict[str, int]:
        """Parameters with gradients in Megatron's buffers, and those that the optimizer
        has a state of."""
        buffers = self._buffers(self._rank._step.chunks)
        parts = self._rank._step.optimizer.chained_optimizers
        return {
            "parameters": sum(
                parameter.numel() for buffer in buffers for parameter in buffer.params
            ),
            "optimizer": sum(
                parameter.numel()
                for part in parts
                for group in part.optimizer.param_groups
                for parameter in group["params"]
            ),
        }

    def logprobs(self, prompts: list[list[int]]) -> list[NDArray[np.float32]]:
        return self._rank.logprobs(prompts)

    def row_logprobs(self, rows: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        return self._rank._step.logprob_passes.logprobs(list(rows))

    def token_logprobs(self, shard: Shard) -> list[NDArray[np.float32]]:
        return self._rank.token_logprobs(shard)

    def token_values(self, shard: Shard) -> list[NDArray[np.float32]]:
        step = self._rank._step
        samples = [sample for mini_batch in shard for sample in mini_batch.samples]
        [values] = step.critic.values(
            [step.logprob_passes.pack(step.masks.sequences(samples))]
        )
        return values

    def export(self, path: str) -> FileEntries:
        return self._rank.export_hugging_face(path)

    def layout(self, _: None) -> WeightLayout:
        return self._rank.layout()

    def stage(self, version: WeightVersion) -> StagedWeights:
        return self._rank.stage(version)

    def staged(self, version: int) -> dict[str, str]:
        """Checksums by name; empty on a rank that only sends its parts."""
        staged = self._rank.stage(version)
        return dict(staged.checksums) if staged else {}

    def save(self, path: str) -> FileEntries:
        return self._rank.save_checkpoint(path)

    def lack_space(self, name: str) -> None:
        """From now on this rank finds no space for files whose names begin so; for ""
        it finds space again."""

        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if name and "w" in mode and Path(file).name.startswith(name):
                file = "/dev/full"
            return self._open(file, mode, *args, **options)

        io.open = builtins.open = cast(Any, opened)

    def write_imaged(
        self, given: tuple[str, str, str, str, Sequence[int]]
    ) -> FileEntries:
        """Calls a method that writes. Whenever a file that it writes has one of these
        lengths, and when it is complete, the folder of checkpoints is copied as it is
        then."""
        from invrl.store.checksummed_file import ChecksummedFile

        method, path, folder, images, lengths = given
        write = ChecksummedFile.write
        close = ChecksummedFile.close

        def write_to_lengths(file: ChecksummedFile, data: Any) -> int:
            rest = memoryview(data).cast("B")
            num_bytes = len(rest)
            begin = file.tell()
            for length in lengths:
                if begin <= length < begin + num_bytes:
                    count = length - file.tell()
                    write(file, rest[:count])
                    rest = rest[count:]
                    file.flush()
                    take_image(Path(folder), Path(images), f"{method}-{length}")
            write(file, rest)
            return num_bytes

        def close_imaged(file: ChecksummedFile) -> None:
            close(file)
            take_image(Path(folder), Path(images), f"{method}-whole-file")

        ChecksummedFile.write = write_to_lengths
        ChecksummedFile.close = close_imaged
        try:
            return getattr(self, method)(path)
        finally:
            ChecksummedFile.write = write
            ChecksummedFile.close = close

    def copy(self, given: tuple[str, str]) -> None:
        """Begins to write model and state; no model if its path is empty."""
        model, state = given
        if model:
            self._rank.copy_model(model)
        self._rank.copy_checkpoint(state)

    def finish_copy(self, _: None) -> tuple[FileEntries, FileEntries]:
        return self.write_model(), self.write_state()

    def hold_writer(self, _: None) -> None:
        """What is copied from now on is written by `write_model` and `write_state`, and
        not before."""
        self._rank._writer = HeldWriter()

    def write_model(self, _: object = None) -> FileEntries:
        if isinstance(self._rank._writer, HeldWriter):
            self._rank._writer.run_next()
        return self._rank.model_written.result(CALL_S)

    def write_state(self, _: object = None) -> FileEntries:
        if isinstance(self._rank._writer, HeldWriter):
            self._rank._writer.run_next()
        self._rank.state_written.result(CALL_S)
        return self._rank.finish_checkpoint()

    def load(self, path: str) -> None:
        self._rank.load_checkpoint(path)

    def saved_bytes(self, num_tokens: int) -> int:
        """Bytes that a forward pass of one row keeps for its backward pass, without
        parameters."""
        import torch

        from invrl.train.batches.micro_batch import TokenSequence
        from invrl.train.batches.packing import pack

        tokens_T = (
            np.random.default_rng(0).integers(10, 500, num_tokens + 1).astype(np.int32)
        )
        row = TokenSequence(
            tokens_T=tokens_T, wanted_N=np.array([num_tokens]), temperature=1.0
        )
        [micro_batch] = pack([row], max_tokens=num_tokens, share_prefixes=True)
        parameters = {
            parameter.untyped_storage().data_ptr()
            for parameter in self._rank._step.chunks[0].parameters()
        }
        storages: dict[int, Any] = {}

        def record(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                # kept, so that no other takes its address
                storages[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            self._rank._step.chunks[0](micro_batch)
        return sum(storage.nbytes() for storage in storages.values())

    def hold(self, num_bytes: int) -> None:
        """Makes the process larger."""
        self._held = np.ones(num_bytes, np.uint8)

    def growth(self, given: tuple[str, str]) -> int:
        """Bytes by which this process and its children were larger than before, at
        most, during a call."""
        method, argument = given
        # or a call would grow into memory that was freed before
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = resident("VmRSS")
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        getattr(self, method)(argument)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        assert ended == children, f"{method} started a process"
        return resident("VmHWM") - before


class HeldWriter:
    """In the place of the thread that writes checkpoints: a test says when."""

    def __init__(self) -> None:
        self._held: deque[tuple[Future[Any], Callable[[], object]]] = deque()

    def submit(
        self, call: Callable[..., Any], *arguments: Any, **named: Any
    ) -> Future[Any]:
        future: Future[Any] = Future()
        self._held.append((future, partial(call, *arguments, **named)))
        return future

    def run_next(self) -> None:
        future, call = self._held.popleft()
        future.set_result(call())


def _raise(*_: object) -> None:
    raise ZeroDivisionError


def take_image(folder: Path, images: Path, cut: str) -> None:
    """Copies the folder as kill -9 of its writer would leave it now. Images are
    numbered in their order."""
    shutil.copytree(folder, images / f"{len(list(images.iterdir())):03d}-{cut}")


def _trains(part: Any, parameter: Any) -> bool:
    """Whether an optimizer has the parameter."""
    return any(
        parameter is own
        for group in part.optimizer.param_groups
        for own in group["params"]
    )


def resident(name: str) -> int:
    """Bytes, as the kernel counts them for this process."""
    lines = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
    )
    return int(lines[name].split()[0]) * 1024


_RENEW = 0
_CLOSED = 1
"""Why a child ended."""


def fork_processes(address: str) -> None:
    """In the parent: fork a process for each address that arrives."""
    gc.disable()  # until everything is imported
    process = RankProcess()
    # Else each child collects, and thereby copies, what all of them share.
    gc.freeze()
    gc.enable()
    orders = Client(address, "AF_UNIX")
    while True:
        try:
            address_of_process = orders.recv()
        except EOFError:
            return
        if os.fork() == 0:
            die_with_parent()
            orders.close()
            serve(address_of_process, process)
            os._exit(0)


def serve(address: str, process: RankProcess) -> None:
    connection = Client(address, "AF_UNIX")
    why_ended = _RENEW
    while why_ended == _RENEW:
        child = os.fork()
        if child == 0:
            die_with_parent()
            os._exit(answer_calls(connection, process))
        _, status = os.waitpid(child, 0)
        why_ended = os.waitstatus_to_exitcode(status)


def answer_calls(connection: Connection, process: RankProcess) -> int:
    """In a child: until its rank is no longer wanted. What it prints goes to the log at
    once."""
    while True:
        try:
            method, argument = connection.recv()
        except (EOFError, ConnectionError):
            return _CLOSED
        if method == "renew":
            connection.send(None)
            return _RENEW
        try:
            answer = getattr(process, method)(argument)
        except Exception as error:
            traceback.print_exc()
            answer = error
        sys.stdout.flush()
        connection.send(answer)


if __name__ == "__main__":
    # Pickled values name this module, so it is imported under its own name, not as
    # __main__.
    from rank_pool import fork_processes as imported_fork_processes

    imported_fork_processes(sys.argv[1])
