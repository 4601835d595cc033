"""The random models that stages train and serve, written once for all of them."""

import contextlib
import os
from pathlib import Path

from tiny_model import make_tiny_model

from gpu_check.settings import CheckSettings, ModelName


def random_model(settings: CheckSettings, name: ModelName) -> Path:
    """A folder in the shape of Qwen3, in bfloat16. `small` is for what only has to
    work, `half` has 0.5 billion parameters and is for what is timed; both are small in
    a smoke run."""
    size = "small" if settings.smoke else name
    folder = settings.work / "models" / size
    if folder.exists():
        return folder
    partial = folder.with_name(f"{size}-{os.getpid()}")
    _write(partial, size)
    with contextlib.suppress(OSError):  # another stage was faster
        partial.rename(folder)
    return folder


def _write(folder: Path, size: ModelName) -> None:
    if size == "half":
        make_tiny_model(
            folder,
            family="qwen3",
            dtype="bfloat16",
            init_std=0.02,
            vocab_size=65536,
            layers=28,
            hidden=1024,
            intermediate=3072,
            heads=16,
            kv_heads=8,
            head_dim=128,
            tie_embeddings=True,
            max_positions=32768,
        )
        return
    make_tiny_model(
        folder,
        family="qwen3",
        dtype="bfloat16",
        init_std=0.02,
        layers=4,
        hidden=256,
        intermediate=512,
        heads=4,
        kv_heads=2,
        head_dim=64,
    )
