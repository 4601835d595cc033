"""The data of a run on a file: its samples, and their tokens by the run's model and
template.

Invariant: a resumed run reads the same bytes as before, because its samples are chosen
by their position.
"""

import hashlib
import json
from pathlib import Path

from xxhash import xxh3_64

from invrl.datasets.dataset import Dataset, load_dataset
from invrl.errors import ConfigError
from invrl.families.hf_config import read_hf_config
from invrl.gateway.rendering.loading import load_renderer
from invrl.host.files.disk import write_atomically
from invrl.run.settings.config import Config
from invrl.store.run_folder import RunFolder


def load_run_data(config: Config) -> Dataset:
    """Read the files that the settings name. The model folder must have been checked.
    Raises ConfigError."""
    folder = config.model.folder
    shape = read_hf_config(folder)
    max_tokens = shape.max_position_embeddings
    if config.train.max_sample_tokens:
        max_tokens = min(max_tokens, config.train.max_sample_tokens)
    renderer = load_renderer(
        str(folder),
        shape.vocab_size,
        chat_template=config.gateway.chat_template_path or "",
        keep_thinking=config.gateway.keep_thinking,
        special_tokens_in_content=config.gateway.special_tokens_in_content,
    )
    return load_dataset(
        config.data,
        config.algorithm.objective,
        renderer,
        max_tokens=max_tokens,
        seed=config.run.seed,
    )


def check_unchanged(config: Config, folder: RunFolder, *, first_step: int) -> None:
    """Record the checksums of the run's files; in a resumed run, compare with them.
    Raises ConfigError for a file that has changed."""
    digests: dict[str, str] = {}
    paths = {"data_path": config.data.data_path, "eval_path": config.data.eval_path}
    for name, path in paths.items():
        if path:
            with Path(path).expanduser().open("rb") as file:
                digests[name] = hashlib.file_digest(file, xxh3_64).hexdigest()
    if first_step and folder.data_digests_path.exists():
        recorded = json.loads(folder.data_digests_path.read_text(encoding="utf-8"))
        for name, digest in digests.items():
            if recorded.get(name) != digest:
                reason = "it has changed since the run began, and the run chooses rows by their place"
                fix = "put the old content back, or begin a new run under another --run-name"
                raise ConfigError(f"data.{name}", paths[name], reason, fix)
    write_atomically(folder.data_digests_path, json.dumps(digests))
