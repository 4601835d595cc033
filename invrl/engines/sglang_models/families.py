"""The model class of the served family, under the name that SGLang expects.

SGLang finds it without this file too, but more slowly.
"""

import importlib
import os

from invrl.engines.sglang_models import MODEL_TYPE_VARIABLE
from invrl.families.registry import FAMILIES


def _classes() -> list[type]:
    family = FAMILIES.get(os.environ.get(MODEL_TYPE_VARIABLE, ""))
    if family is None:
        return []
    module = importlib.import_module(f"sglang.srt.models.{family.sglang_module}")
    return [getattr(module, family.architecture)]


EntryClass = _classes()
