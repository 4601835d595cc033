"""Estimate of a trainer rank's memory at its peak, by the kind of content."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank at its peak."""

    weights: float
    """Including those of the critic and of the frozen reference, if they stay where the
    model's are."""
    gradients: float
    """Float32 sums, and the gradient not yet added to them: that of the vocabulary's
    weight, or that of a layer's experts if that is larger."""
    optimizer: float
    """Float32 master weights and two moments. Ranks with equal weights may hold a part
    each. 0 on a GPU if they are in main memory."""
    step: float
    """Added by a step: activations and logits; or, if that is more, by the frozen
    reference's pass or by loading a checkpoint."""
    heap: float
    """Free memory between the tensors of a step on a CPU, which malloc holds and cannot
    use."""
    staging: float
    """Weights for engines in the same memory: both slots, or a bucket on a GPU, on the
    rank that sends."""
    copy: float
    """Copy of a checkpoint that is written during training, on a CPU, on the first of
    the ranks with equal weights. The rank that collects the model also has it for
    Hugging Face."""
    process: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        parts = [
            f"{field.name} {getattr(self, field.name) / 1e9:.2f}"
            for field in fields(self)
        ]
        return f"{self.total / 1e9:.2f} GB a rank ({', '.join(parts)})"
