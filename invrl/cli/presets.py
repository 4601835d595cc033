"""The preset configurations that invrl ships. `--config quickstart` names one from any
working directory."""

from pathlib import Path

from invrl.errors import ConfigError
from invrl.user_code.near_path import path_fix

_FOLDER = Path(__file__).parents[1] / "presets"
"""Part of the package, so that a checkout and a wheel have it in the same place."""


def preset_names() -> list[str]:
    """Return the names of all presets, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def configuration_file(name_or_path: str) -> Path:
    """Return the file for a value of `--config`: the path of a file, or else the name
    of a preset. Raises ConfigError if it is neither, with the nearest file or
    preset."""
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    presets = preset_names()
    if name_or_path in presets:
        return _FOLDER / f"{name_or_path}.toml"
    if path.stem in presets:
        reason = f"there is no such file in {Path.cwd()}"
        fix = f"give the preset by its name, from any folder: --config {path.stem}"
        raise ConfigError("--config", name_or_path, reason, fix)
    if path.exists():  # a folder: reading it raises the error
        return path
    reason = (
        f"there is neither such a file in {path.absolute().parent} nor such a preset"
    )
    fix = f"give a readable TOML file, or a preset: {', '.join(presets)}"
    raise ConfigError(
        "--config", name_or_path, reason, path_fix(path, fix, names=presets)
    )
