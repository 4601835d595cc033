"""The data of a run on a file: its rows, and what makes tokens of them with the run's model and template."""

from invrl.datasets.dataset import Dataset, ModelText, load_dataset
from invrl.run.config import Config
from invrl.train.hf_config import read_hf_config


def load_run_data(config: Config) -> Dataset:
    """Reads the files that the settings name. The model folder must have been checked. Raises ConfigError."""
    folder = config.model.folder
    shape = read_hf_config(folder)
    max_tokens = shape.max_position_embeddings
    if config.train.max_row_tokens:
        max_tokens = min(max_tokens, config.train.max_row_tokens)
    model = ModelText(
        folder=folder,
        vocab_size=shape.vocab_size,
        chat_template=config.gateway.chat_template_path,
        keep_thinking=config.gateway.keep_thinking,
        max_tokens=max_tokens,
    )
    return load_dataset(config.data, config.algorithm.objective, model, seed=config.run.seed)
