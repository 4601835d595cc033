"""The preset configurations that are shipped with invrl, by name: `--config quickstart`, from any folder."""

from pathlib import Path

from invrl.errors import ConfigError

_FOLDER = Path(__file__).parents[1] / "presets"
"""They are files of the package, in a checkout and in a wheel."""


def preset_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def configuration_file(given: str) -> Path:
    """The file that `--config` was given: a path, or else a preset's name. ConfigError for a path that does
    not exist and ends in the name of a preset."""
    path = Path(given).expanduser()
    if path.is_file():
        return path
    if given in preset_names():
        return _FOLDER / f"{given}.toml"
    if path.stem in preset_names():
        fix = f"give the preset by its name, from any folder: --config {path.stem}"
        raise ConfigError("--config", given, f"there is no such file in {Path.cwd()}", fix)
    return path
