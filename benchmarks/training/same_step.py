"""`python -m benchmarks.training.same_step`: proves that our training step and the
plain one are the same, before their speeds are compared. Settings come as JSON on the
standard input; the exit code is the result.

It compares the gradients' norms in float32, of short batches. In bfloat16 the gradients
of rows whose advantages cancel are mostly rounding, and two right steps can differ by
half of the norm.
"""

import sys
from dataclasses import dataclass

import torch
from pydantic import TypeAdapter

from benchmarks.training.hugging_face_step import HuggingFaceStep, pad_batch
from benchmarks.training.step_program import start_rank
from benchmarks.training.workloads import WORKLOADS, make_batch
from invrl.algorithms.config import AlgorithmConfig
from invrl.errors import TrainError
from invrl.families.hf_config import read_hf_config
from invrl.train.batches.sharding import shard_batch
from invrl.train.config import TrainConfig
from invrl.types.metrics import resolve

_TOKENS = 256
"""Of a batch; at most half of them in a micro-batch, so that gradients accumulate."""
_NORM_GAP = 1e-3
"""Largest |ours / plain - 1|. Seen with SmolLM2-135M: 4e-5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SameStepSettings:
    model_path: str
    train: TrainConfig


def check_same_step(settings: SameStepSettings) -> None:
    """Raises TrainError for a workload whose gradients differ."""
    train = settings.train.model_copy(
        update={"train_dtype": "float32", "max_tokens_per_micro_batch": _TOKENS // 2}
    )
    algorithm = AlgorithmConfig.model_validate({})
    rank = start_rank(settings.model_path, train, algorithm)
    plain = HuggingFaceStep(settings.model_path, train, algorithm)
    vocab_size = read_hf_config(settings.model_path).vocab_size
    for workload in WORKLOADS:
        batch = make_batch(
            workload, num_tokens=_TOKENS, longest=_TOKENS // 2, vocab_size=vocab_size
        )
        [shard] = shard_batch(batch, ranks=1, steps=1)
        ours = resolve(rank.train(shard).metrics, "")["grad_norm"]
        reference = plain.run(
            pad_batch(batch, tokens=_TOKENS // 2, sorted_by_length=False)
        )
        # A comparison with NaN is False, so a NaN does not pass.
        if not abs(ours / reference - 1) <= _NORM_GAP:
            raise TrainError(
                f"these are not the same step: {workload} has a gradient norm of {ours:.6g} in ours and of "
                f"{reference:.6g} in the plain one"
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_same_step(TypeAdapter(SameStepSettings).validate_json(sys.stdin.read()))
