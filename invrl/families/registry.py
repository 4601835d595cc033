"""The supported model families: every module of this package that defines `FAMILY`.

This is the only list; commands that refuse a model read it.
"""

import importlib
import pkgutil

from invrl import families
from invrl.families.family import Family


def _find() -> dict[str, Family]:
    found: dict[str, Family] = {}
    for module_info in pkgutil.iter_modules(families.__path__):
        if module_info.name in ("hf_config", "registry"):
            continue  # they read the list
        module = importlib.import_module(f"{families.__name__}.{module_info.name}")
        family = getattr(module, "FAMILY", None)
        if isinstance(family, Family):
            found[family.model_type] = family
    return dict(sorted(found.items()))


FAMILIES: dict[str, Family] = _find()
"""`model_type` in config.json -> the family."""
