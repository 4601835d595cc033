"""Start arguments of one trainer rank. Importable without torch, so that the driver can
build them."""

from dataclasses import dataclass, field

from invrl.algorithms.config import AlgorithmConfig
from invrl.host.output.log_lines import LogSettings
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.weights.config import AnyWeights, ArenaWeights, CollectiveWeights

Scalar = bool | int | float | str
"""Value of a `--megatron-*` option as given."""
CRITIC_FOLDER = "critic"
"""Folder below that of a checkpoint: the state of a critic on separate ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """Settings of one rank; all ranks of a trainer differ only in `rank`. Those of a
    critic on separate ranks have another `layout` and `store_key`."""

    rank: int
    layout: ParallelLayout
    master_addr: str
    """Address of rank 0's node that every other rank reaches; loopback on one
    machine."""
    store_key: str = field(repr=False)
    """Prefix of every name in the ranks' common store: random, so that no other process
    can guess them."""
    model_path: str
    reference_path: str = ""
    """Folder with the weights of the frozen reference; "": those of `model_path`. They
    are read only if the objective needs a reference."""
    teacher_path: str = ""
    """Folder with the weights of a teacher of the same shape; "": the trainer computes
    none."""
    critic_path: str = ""
    """Folder with the critic's initial weights; "": those of `model_path`. They are
    read only if the objective needs values."""
    chat_template: str = ""
    """Jinja text that replaces the model's own chat template; "": the model's own."""
    train: TrainConfig
    algorithm: AlgorithmConfig
    weight_dtype: str
    """Dtype of the engines' weights, by torch's name."""
    weights: AnyWeights = field(default_factory=lambda: ArenaWeights.model_validate({}))
    """Way of the weights to the engines. Where they join a broadcast, the host is
    `master_addr` if the settings have none."""
    engine_ranks: int = 1
    """Processes of each engine that share its weights."""
    visible_gpus: str | None = None
    """Value of CUDA_VISIBLE_DEVICES that shows this rank its own GPU first, and then the
    others, which it opens by CUDA IPC. None: the rank is on the CPU, or its process is set up already."""
    host_threads: int = 1
    """Threads of a rank on a GPU for what it computes in main memory."""
    arena_on_gpu: bool = False
    """Whether the transport `arena` takes memory of this rank's GPU instead of the
    host."""
    broadcast_on_gpu: bool = False
    """Whether the transport `collective` sends from this rank's GPU to the engines', by
    NCCL."""
    weight_folder: str = ""
    """Folder that only the transports `disk` and `delta` write to."""
    base_checksum_path: str | None = None
    """File that keeps the checksum of an adapter's base. None: it is not kept."""
    megatron: dict[str, Scalar] = field(default_factory=dict)
    """`--megatron-*` options by field name, not parsed yet."""
    seed: int = 0
    log: LogSettings | None = None
    """Log settings of the rank's process; None: its loggers stay unchanged."""

    @property
    def broadcast_host(self) -> str:
        """The trainer's address for engines that join a broadcast."""
        if isinstance(self.weights, CollectiveWeights) and self.weights.host:
            return self.weights.host
        return self.master_addr
