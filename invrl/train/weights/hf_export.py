"""Writes the trained model as a Hugging Face folder that plain transformers loads."""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from invrl.host.files.disk import flush, flush_tree
from invrl.interfaces import WeightLayout
from invrl.store.manifest import MANIFEST_NAME
from invrl.store.run_folder import KEEP_NAME
from invrl.train.weights.safetensors_file import INDEX_NAME, write_weights
from invrl.types.file_entry import FileEntries
from invrl.user_code.model_folder import ADDITIONAL_TEMPLATES

_NOT_COPIED = (
    ".safetensors",
    ".bin",
    ".gguf",
    ".pt",
    ".pth",
    ".msgpack",
    ".h5",
    INDEX_NAME,
    "adapter_config.json",
    "adapter_base.json",
    MANIFEST_NAME,
    KEEP_NAME,
)
"""Ends of file names: the source's weights, what says that they are an adapter's, and
files that a run adds to a folder."""


def export_hugging_face(
    weights: Iterable[tuple[str, torch.Tensor]],
    specs: WeightLayout,
    source: str,
    path: str,
    *,
    chat_template: str = "",
    max_shard_bytes: float,
) -> FileEntries:
    """Write the weights of `specs` beside the other files of `source`, as
    `writing_folder` does. Returns the entries of the files with weights."""
    with writing_folder(source, path, chat_template) as folder:
        set_dtype(folder / "config.json", specs[0].dtype)
        return write_weights(folder, specs, weights, max_shard_bytes=max_shard_bytes)


@contextmanager
def writing_folder(source: str, path: str, chat_template: str) -> Iterator[Path]:
    """Offer a new folder with configuration, tokenizer and template of `source`, to be
    filled.

    A `chat_template` replaces the source's own, so that the model is served with the
    template it was trained with. The folder appears whole at `path` and replaces one
    that was there; its files are on disk by then. The files get ordinary modes,
    whatever the modes of the source's files.
    """
    folder = Path(path)
    new_folder = folder.with_name(folder.name + ".new")
    shutil.rmtree(new_folder, ignore_errors=True)
    new_folder.mkdir(parents=True)
    copy_other_files(Path(source), new_folder)
    if chat_template:
        # transformers reads this file before the templates in tokenizer_config.json.
        (new_folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        shutil.rmtree(new_folder / ADDITIONAL_TEMPLATES, ignore_errors=True)
    yield new_folder
    flush_tree(new_folder)
    shutil.rmtree(folder, ignore_errors=True)
    new_folder.rename(folder)
    flush(folder.parent)


def copy_other_files(source: Path, to: Path) -> None:
    """Copy configuration, tokenizer and template of a Hugging Face folder: all but its
    weights."""
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_NOT_COPIED):
            shutil.copyfile(file, to / file.name)
    templates = source / ADDITIONAL_TEMPLATES
    if templates.is_dir():
        (to / ADDITIONAL_TEMPLATES).mkdir()
        for file in templates.glob("*.jinja"):
            shutil.copyfile(file, to / ADDITIONAL_TEMPLATES / file.name)


def set_dtype(config_file: Path, dtype: str) -> None:
    """Write the weights' dtype into config.json, under the name of transformers 5."""
    hf_config = json.loads(config_file.read_text(encoding="utf-8"))
    hf_config.pop("torch_dtype", None)
    hf_config["dtype"] = dtype
    config_file.write_text(json.dumps(hf_config, indent=2) + "\n", encoding="utf-8")
