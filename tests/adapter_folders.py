"""Adapters of the test models: PEFT folders with random factors, and the models that
they make. Knows nothing of the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Arrays = dict[str, NDArray[np.float32]]
Wide = dict[str, NDArray[np.float64]]
PREFIX = "base_model.model."


def projection_shapes(model: Path) -> dict[str, tuple[int, int]]:
    """Of every linear projection in the layers of a saved model, by module."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", framework="numpy") as file:
        return {
            name.removesuffix(".weight"): tuple(file.get_slice(name).get_shape())
            for name in file.keys()  # noqa: SIM118
            if "_proj" in name and name.endswith(".weight")
        }


def make_adapter(
    folder: Path,
    model: Path,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    targets: tuple[str, ...] = (),
    with_experts: bool = True,
    seed: int = 0,
) -> Path:
    """A folder as PEFT writes it, with both factors random. No targets: all."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    tensors: Arrays = {}
    kinds: set[str] = set()
    for module, (outputs, inputs) in projection_shapes(model).items():
        kind = module.rpartition(".")[2]
        if targets and kind not in targets:
            continue
        if ".experts." in module and not with_experts:
            continue
        kinds.add(kind)
        a = rng.normal(0, inputs**-0.5, (rank, inputs))
        b = rng.normal(0, 0.1, (outputs, rank))
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(kinds),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(model: Path, factors: Arrays, scale: float) -> Wide:
    """The weights of the model with the factors in them, in float64."""
    from safetensors.numpy import load_file

    weights = {
        name: weight.astype(np.float64)
        for name, weight in load_file(model / "model.safetensors").items()
    }
    for name, a in factors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        b = factors[name.replace("lora_A", "lora_B")]
        change = b.astype(np.float64) @ a.astype(np.float64)
        weights[name.replace(".lora_A", "")] += scale * change
    return weights


def adapted_model(model: Path, adapter: Path) -> torch.nn.Module:
    """Return transformers' model in float32 with the adapter of a PEFT folder merged
    into it."""
    import torch
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM

    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = {
        name.removeprefix(PREFIX): factor
        for name, factor in load_file(adapter / "adapter_model.safetensors").items()
    }
    weights = merged(model, factors, config["lora_alpha"] / config["r"])
    state = {name: torch.from_numpy(weight) for name, weight in weights.items()}
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    whole.load_state_dict(state, strict=False)
    return whole.eval()
