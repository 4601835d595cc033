"""The folder of an environment: one of the catalog, by its name, or a user's own."""

import ast
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from invrl.errors import ConfigError
from invrl.user_code.near_path import path_fix

CATALOG = Path(__file__).with_name("catalog")
_FILES = ("environment.py", "requirements.txt", ".python-version")


@dataclass(frozen=True)
class EnvironmentFolder:
    """Program, packages and Python of one environment."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def called(self) -> str:
        """What a command calls it: its name in the catalog, or its path."""
        return self.name if self.path.parent == CATALOG else str(self.path)

    @cached_property
    def requirements(self) -> list[str]:
        """Packages, each with its version."""
        text = self.path.joinpath("requirements.txt").read_text(encoding="utf-8")
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        return [line for line in lines if line]

    @property
    def python(self) -> str:
        """Version of Python, such as "3.11"."""
        return self.path.joinpath(".python-version").read_text(encoding="utf-8").strip()

    @property
    def summary(self) -> str:
        """First line of the program's docstring."""
        source = self.path.joinpath("environment.py").read_text(encoding="utf-8")
        return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]

    @property
    def digest(self) -> str:
        """Digest of Python and packages: environments with the same may share them."""
        text = "\n".join([self.python, *self.requirements])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def catalog() -> list[EnvironmentFolder]:
    return [
        EnvironmentFolder(path)
        for path in sorted(CATALOG.iterdir())
        if path.joinpath("environment.py").exists()
    ]


def find_environment(field: str, name: str) -> EnvironmentFolder:
    """Return the environment of this name in the catalog, or in this folder if the name
    has a slash. Raises ConfigError about `field`."""
    if "/" not in name:
        names = [folder.name for folder in catalog()]
        if name in names:
            return EnvironmentFolder(CATALOG / name)
        fix = f"use one of: {', '.join(names)}; or ./FOLDER for one of your own"
        fix = path_fix(CATALOG / name, fix)
        reason = "no environment has this name"
        raise ConfigError(field, name, reason, fix.replace(f"{CATALOG}/", ""))
    path = Path(name).expanduser().absolute()
    for file in _FILES:
        if not path.joinpath(file).is_file():
            reason = f"an environment's folder holds {', '.join(_FILES)}; there is no {path / file}"
            raise ConfigError(
                field, name, reason, "write the file, or name another folder"
            )
    return EnvironmentFolder(path)
