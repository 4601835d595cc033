"""What every stage is told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ModelName = Literal["small", "half"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    out: Path
    """For logs, profiles and `gpu.json`."""
    work: Path
    """For models and run folders."""
    smoke: bool
    """Everything small, on a CPU."""
    model: ModelName
    """Which random model speed and weight updates are measured with."""
    trained_model: Path | None
    """A model folder that can learn a task, such as the quickstart's. None: random
    weights."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cpu" if self.smoke else "cuda"

    @property
    def sglang_flags(self) -> dict[str, str]:
        """Options of the engines. Triton's attention and torch's sampling need no
        kernels that are built with flashinfer. How large the cache is, every stage says
        itself: the fraction of the memory only has to leave room for what other
        processes of the card take while an engine starts."""
        if self.smoke:
            return {}
        return {
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "mem_fraction_static": "0.85",
            "cuda_graph_max_bs_decode": "32",
            "cuda_graph_backend_prefill": "disabled",
        }
