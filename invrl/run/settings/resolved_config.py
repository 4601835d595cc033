"""The file `config.resolved.toml` of a run folder, with a checksum of every setting in
comments above them.

A run continues with the settings in this file. A changed byte (`lr = 1e-05` -> `lr =
1e-06`) would be read as intended, and a missing setting as its default. So the file
proves its own content. A user may remove the checksums.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from invrl.errors import ConfigError
from invrl.host.files.disk import write_atomically
from invrl.run.settings.config import Config, read_toml, resolve

_TITLE = "# A run goes on with these settings. Flags change them, as in `invrl resume RUN --num-steps 8`."
_LINE = re.compile(r"^# xxh3 of \[(\w+)\]:((?: [0-9a-f]{8})*)$", re.MULTILINE)


def write_resolved(path: Path, config: Config) -> None:
    settings = config.to_toml()
    lines = [_TITLE]
    for table, values in tomllib.loads(settings).items():
        lines.append(
            " ".join(
                [
                    f"# xxh3 of [{table}]:",
                    *(_checksum(*item) for item in values.items()),
                ]
            )
        )
    write_atomically(path, "\n".join([*lines, "", settings]))


def load_resolved(path: Path) -> Config:
    """Load the configuration of a run folder, as it was written. Raises ConfigError if
    it was changed since."""
    source = read_toml(path)
    if not source.tables:
        raise _changed(path, path.name, "", "the file is empty")
    for table, checksums in _LINE.findall(path.read_text(encoding="utf-8")):
        _check_table(path, table, source.tables.get(table, {}), checksums.split())
    return resolve(source)


def _check_table(
    path: Path, table: str, values: Mapping[str, Any], checksums: list[str]
) -> None:
    if len(values) != len(checksums):
        reason = (
            f"the table has {len(values)} settings, and {len(checksums)} were written"
        )
        raise _changed(path, f"[{table}]", "", reason)
    for (name, value), checksum in zip(values.items(), checksums, strict=True):
        if _checksum(name, value) != checksum:
            raise _changed(
                path, f"{table}.{name}", value, "the run was written with another value"
            )


def _checksum(name: str, value: Any) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest(json.dumps([name, value]).encode())[:8]


def _changed(path: Path, field: str, value: object, reason: str) -> ConfigError:
    fix = (
        f"copy back the {path.name} that the run wrote, and change settings by flags; to go on with the "
        "changed file all the same, remove its lines that begin with `# xxh3`"
    )
    return ConfigError(
        field, value, f"{path} was changed since the run wrote it: {reason}", fix
    )
