"""Reads a Hugging Face folder's `config.json` as the typed, checked description of its
family.

A model that the trainer does not compute exactly is refused here, by name, before a
weight is read. The folder has passed the check of model folders
(`invrl/user_code/model_folder.py`), so its family is supported and its weights are
plain. Imports neither torch nor transformers, so a run can be checked before any
process starts.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import NoneType
from typing import get_args

from pydantic import ValidationError

from invrl.families.model_config import HuggingFaceConfig
from invrl.families.refusal import refused
from invrl.families.registry import FAMILIES
from invrl.types.tasks import Json


def read_hf_config(folder: str | Path) -> HuggingFaceConfig:
    """Read config.json of a folder that has passed `check_model_folder`. Raises
    ConfigError for an unsupported feature."""
    return parse_hf_config(
        json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    )


def parse_hf_config(config: Mapping[str, Json]) -> HuggingFaceConfig:
    """Parse config.json with the field names of transformers 4 or 5. Raises
    ConfigError."""
    family = FAMILIES[str(config["model_type"])]
    fields: dict[str, Json] = {
        name: value for name, value in config.items() if value is not None
    }
    for name, field in family.config.model_fields.items():
        if name in config and NoneType in get_args(field.annotation):
            fields[name] = config[name]  # null is a value of this field
    try:
        return family.config.read(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise refused(name, config.get(name), first["msg"]) from None


def unfitting_tensors(config: HuggingFaceConfig, names: Collection[str]) -> str:
    """Return how the tensors of a folder differ from those of the model that its
    config.json describes; "" if they do not."""
    expected = {
        name
        for parameter in FAMILIES[config.model_type].parameters(config)
        for name in parameter.hugging_face
    }
    given = {name for name in names if not config.leaves_out(name)}
    if given == expected:
        return ""
    missing = sorted(expected - given)
    unknown = sorted(given - expected)
    return (
        f"the weights are not those that config.json describes: {len(missing)} tensors are missing "
        f"{missing[:3]}, {len(unknown)} are not of a {config.model_type} model {unknown[:3]}"
    )
