"""What one trainer rank is started with. Importable without torch, so that the driver
can build it."""

from dataclasses import dataclass, field

from invrl.algorithms.config import AlgorithmConfig
from invrl.host.log_lines import LogSettings
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.weights.config import AnyWeights, ArenaWeights

Scalar = bool | int | float | str
"""A value of `--megatron-*` as it was given."""
CRITIC_FOLDER = "critic"
"""Below the folder of a checkpoint: the state of a critic that has ranks of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """Settings of one rank; all ranks of a trainer differ only in `rank`. Those of a
    critic that has ranks of its own have another `layout` and `store_key`."""

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
    """Folder with the weights of a teacher of the same shape; "": none that the trainer
    computes."""
    critic_path: str = ""
    """Folder with the weights that the critic begins with; "": those of `model_path`.
    They are read only if the objective needs values."""
    chat_template: str = ""
    """Jinja text that the run uses instead of the model's own chat template; "" means
    the model's own."""
    train: TrainConfig
    algorithm: AlgorithmConfig
    weight_dtype: str
    """The dtype in which the engines hold the weights, by torch's name."""
    weights: AnyWeights = field(default_factory=lambda: ArenaWeights.model_validate({}))
    """How the weights reach the engines. Where they join a broadcast, the host is
    `master_addr` if the settings have none."""
    engine_ranks: int = 1
    """Processes of each engine that share its weights out."""
    arena_on_gpu: bool = False
    """The transport `arena` takes memory of this rank's GPU, not of the host."""
    weight_folder: str = ""
    """Where the transports `disk` and `delta` write: a folder for them alone."""
    megatron: dict[str, Scalar] = field(default_factory=dict)
    """`--megatron-*` options by field name, not parsed yet."""
    seed: int = 0
    log: LogSettings | None = None
    """What the rank's process logs, and how; None: its loggers stay as they are."""
