"""Low-rank factors of one projection, W + scale B A, on one rank.

Each factor is divided as its side of W is. What is communicated between the two
products has only `rank` numbers a token:

    W divided by rows      own tokens ─ A ─► gather tokens ─ own rows of B
    W divided by columns   own columns of A ─► sum, scatter tokens ─ B ─► own tokens
    W on every rank        own tokens ─ A ─ B

A factor that a rank applies to its own tokens only has a part of the gradient there;
Megatron sums it over the tensor-parallel ranks. Imported after `device.prepare()`.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch.nn.functional import dropout, linear

from invrl.families.parameter import Fusion, join, split
from invrl.families.projections import Projection
from invrl.train.config import LoraConfig
from invrl.train.layers.grouped_linear import grouped_linear


class LowRank(torch.nn.Module):
    """Factors A and B of one projection, or this rank's parts of them."""

    def __init__(
        self,
        projection: Projection,
        weight: torch.Tensor,
        num_rows: int,
        lora: LoraConfig,
        seed: int,
    ) -> None:
        """`weight` is this rank's part of the parameter that holds the projection, and
        `num_rows` the number of its rows that are the projection's."""
        super().__init__()
        num_columns = weight.shape[1]
        self.lora_A = torch.nn.Parameter(
            weight.new_empty(lora.rank, num_columns), requires_grad=True
        )
        self.lora_B = torch.nn.Parameter(
            weight.new_zeros(num_rows, lora.rank), requires_grad=True
        )
        self._sharding = projection.parameter.sharding
        self._is_divided = (
            projection.parameter.expert is None
            and parallel_state.get_tensor_model_parallel_world_size() > 1
        )
        self._scale = lora.scale
        self._dropout = lora.dropout
        self._initialize(projection, seed)
        if self._is_divided:
            has_own_tokens = {
                self.lora_A: self._sharding != "columns",
                self.lora_B: self._sharding != "rows",
            }
            for factor, is_partial in has_own_tokens.items():
                factor.sequence_parallel = is_partial  # pyright: ignore[reportAttributeAccessIssue]

    def _initialize(self, projection: Projection, seed: int) -> None:
        """Draw A as PEFT does, from numbers that depend on the projection and the seed
        alone, so that every layout begins alike."""
        rank, num_columns = self.lora_A.shape
        first_column = 0
        num_inputs = num_columns
        if self._is_divided and self._sharding == "columns":
            num_inputs *= parallel_state.get_tensor_model_parallel_world_size()
            first_column = num_columns * parallel_state.get_tensor_model_parallel_rank()
        digest = hashlib.sha256(f"{seed} {projection.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        bound = 1 / math.sqrt(num_inputs)  # kaiming-uniform with a = sqrt(5)
        whole = torch.empty(rank, num_inputs).uniform_(
            -bound, bound, generator=generator
        )
        with torch.no_grad():
            self.lora_A.copy_(whole[:, first_column : first_column + num_columns])

    def forward(self, hidden: torch.Tensor, *, drops: bool) -> torch.Tensor:
        """Return what is added to the projection's output. `drops`: with dropout."""
        low = self._scale * linear(self.dropped(hidden, drops=drops), self.lora_A)
        if self._is_divided and self._sharding == "rows":
            low = gather_from_sequence_parallel_region(
                low, tensor_parallel_output_grad=True
            )
        if self._is_divided and self._sharding == "columns":
            low = reduce_scatter_to_sequence_parallel_region(low)
        return linear(low, self.lora_B)

    def dropped(self, hidden: torch.Tensor, *, drops: bool) -> torch.Tensor:
        if not drops or not self._dropout:
            return hidden
        return dropout(hidden, self._dropout)

    def change(self) -> torch.Tensor:
        """Return what is added to this rank's part of W, in float32."""
        return self._scale * (
            self.lora_B.detach().float() @ self.lora_A.detach().float()
        )

    @staticmethod
    def grouped(
        experts: Sequence["LowRank"],
        rows_PI: torch.Tensor,
        sizes_E: Sequence[int],
        *,
        drops: bool,
    ) -> torch.Tensor:
        """Return what the adapters of the same projection of several experts add to
        their outputs. The rows of each expert follow those of the one before."""
        first = experts[0]
        low_PR = first._scale * grouped_linear(
            first.dropped(rows_PI, drops=drops),
            sizes_E,
            [expert.lora_A for expert in experts],
        )
        return grouped_linear(low_PR, sizes_E, [expert.lora_B for expert in experts])


class Addition:
    """Adapters of one Megatron parameter, and their joint output in its order of
    rows."""

    def __init__(
        self,
        fusion: Fusion,
        weight: torch.Tensor,
        *,
        groups: int,
        head_dim: int,
    ) -> None:
        """`weight` is this rank's part of the parameter. `groups` is the rank's number
        of key-value heads."""
        self._fusion: Fusion = fusion
        self._groups = groups
        pieces = split(fusion, weight[:, :1], groups=groups, head_dim=head_dim)
        self.num_rows = [len(piece) for piece in pieces]
        """Rows of each projection in the parameter."""
        self.factors: list[LowRank | None] = [None] * len(self.num_rows)
        """Adapters of the projections, in the order of the parameter's tensors."""

    def output(self, hidden: torch.Tensor, *, drops: bool) -> torch.Tensor:
        """Return what is added to the layer's output."""
        parts = [
            None if factor is None else factor(hidden, drops=drops)
            for factor in self.factors
        ]
        return self.joined(parts)

    def joined(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Join the outputs of the projections, 0 for those without an adapter, along
        the last dimension."""
        present = next(part for part in parts if part is not None)
        filled = [
            present.new_zeros(*present.shape[:-1], num_rows) if part is None else part
            for part, num_rows in zip(parts, self.num_rows, strict=True)
        ]
        if self._fusion != "qkv":
            return torch.cat(filled, dim=-1)
        by_group = [part.unflatten(-1, (self._groups, -1)) for part in filled]
        return torch.cat(by_group, dim=-1).flatten(-2)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the parameter with the adapters in it, in its dtype. It stays as it
        is."""
        changes = [
            weight.new_zeros(num_rows, weight.shape[1], dtype=torch.float32)
            if factor is None
            else factor.change()
            for factor, num_rows in zip(self.factors, self.num_rows, strict=True)
        ]
        change = join(self._fusion, changes, groups=self._groups)
        return (weight.detach().float() + change).to(weight.dtype)
