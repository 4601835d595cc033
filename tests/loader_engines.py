"""Engines without SGLang: its weight requests, answered by our loader over small
parameters."""

from __future__ import annotations

import base64
import pickle
import types
from collections.abc import Sequence
from typing import Literal, cast

import torch

from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.client.weight_receiver import ArenaReceiver
from invrl.types.weights import TensorSpec
from invrl.weights.config import ArenaWeights
from invrl.weights.loader import weight_loader

LAYOUT = (
    TensorSpec(name="model.norm.weight", shape=(64,), dtype="float32"),
    TensorSpec(
        name="model.layers.0.self_attn.o_proj.weight", shape=(32, 16), dtype="float32"
    ),
)


class LoaderEngine:
    """SGLang's weight requests, answered by our loader over two parameters."""

    def __init__(self) -> None:
        self.parameters = {spec.name: torch.zeros(spec.shape) for spec in LAYOUT}
        self._model = types.SimpleNamespace(
            named_parameters=lambda: self.parameters.items(), modules=lambda: ()
        )
        self.requests: list[weight_loader.LoaderRequest] = []

    async def update_weights_from_tensor(
        self, payloads: Sequence[str], *, load_format: str, deadline_s: float
    ) -> None:
        named_tensors = pickle.loads(base64.b64decode(payloads[0]))
        request = weight_loader.msgspec.json.decode(
            named_tensors[0][0], type=weight_loader.LoaderRequest
        )
        self.requests.append(request)
        weight_loader.run(self._model, named_tensors)  # type: ignore[arg-type]

    @property
    def loads(self) -> list[bool]:
        """Of each load so far: whether it read the parameters back."""
        return [
            request.digest for request in self.requests if request.arena is not None
        ]


def receiver_of(
    engine: LoaderEngine, readback_every: int, arena: Literal["copy", "alias"] = "copy"
) -> ArenaReceiver:
    settings = ArenaWeights(readback_every=readback_every, arena_mode=arena)
    return ArenaReceiver("engine-0", cast("SglangClient", engine), settings)


RANKS = 4
EXPERT = "model.layers.1.mlp.experts"
ATTENTION = "model.layers.0.self_attn"
SHAPES = {
    # padded to 64: the last rank has 2 rows of its 16
    "model.embed_tokens.weight": (50, 8),
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    # two heads of 4 rows: two ranks share each
    "model.layers.0.self_attn.k_proj.weight": (8, 8),
    "model.layers.0.self_attn.v_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_proj.bias": (16,),
    "model.layers.0.self_attn.k_proj.bias": (8,),
    "model.layers.0.self_attn.v_proj.bias": (8,),
    "model.layers.0.self_attn.o_proj.weight": (8, 16),
    "model.layers.0.mlp.gate_proj.weight": (16, 8),
    "model.layers.0.mlp.up_proj.weight": (16, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 16),
    "model.layers.1.mlp.gate.weight": (2, 8),
    **{
        f"{EXPERT}.{e}.{n}_proj.weight": (8, 8)
        for e in range(2)
        for n in ("gate", "up", "down")
    },
    "model.norm.weight": (8,),
}
SLICED_LAYOUT = tuple(
    TensorSpec(name=name, shape=shape, dtype="float32")
    for name, shape in SHAPES.items()
)


def rank_parameters() -> dict[str, torch.Tensor]:
    """The parameters of one rank of four, as SGLang makes them."""
    return {
        "model.embed_tokens.weight": torch.zeros(16, 8),
        f"{ATTENTION}.qkv_proj.weight": torch.zeros(4 + 4 + 4, 8),
        f"{ATTENTION}.qkv_proj.bias": torch.zeros(4 + 4 + 4),
        f"{ATTENTION}.o_proj.weight": torch.zeros(8, 4),
        "model.layers.0.mlp.gate_up_proj.weight": torch.zeros(4 + 4, 8),
        "model.layers.0.mlp.down_proj.weight": torch.zeros(8, 4),
        "model.layers.1.mlp.gate.weight": torch.zeros(2, 8),
        f"{EXPERT}.w13_weight": torch.zeros(2, 2 + 2, 8),
        f"{EXPERT}.w2_weight": torch.zeros(2, 8, 2),
        "model.norm.weight": torch.zeros(8),
    }


class SlicedEngine:
    """SGLang's weight requests, answered by our loader over the parameters of each
    rank."""

    def __init__(self) -> None:
        self.ranks = [rank_parameters() for _ in range(RANKS)]
        self.order = list(range(RANKS))
        """The rank that gets the n-th payload."""
        self.silent = -1
        """The rank whose loader does nothing."""
        self.is_paused = False

    async def pause(self, mode: str = "retract") -> None: ...

    async def resume(self) -> None: ...

    async def weight_version(self) -> str:
        return "1"

    async def update_weights_from_tensor(
        self, payloads: Sequence[str], *, load_format: str, deadline_s: float
    ) -> None:
        for index, payload in zip(self.order, payloads, strict=True):
            if index == self.silent:
                continue
            parameters = self.ranks[index]
            layer = types.SimpleNamespace(tp_size=RANKS, tp_rank=index)
            model = types.SimpleNamespace(
                named_parameters=parameters.items,
                modules=lambda layer=layer: [object(), layer],
            )
            weight_loader.run(model, pickle.loads(base64.b64decode(payload)))  # type: ignore[arg-type]


def sliced_values(seed: int) -> dict[str, torch.Tensor]:
    """Random checkpoint tensors of `SLICED_LAYOUT`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()
    }
