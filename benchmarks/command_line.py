"""The command line of a benchmark: its help, its model folder, its settings, and its
exit code."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from invrl.cli.main import run_with_exit_code
from invrl.errors import ConfigError
from invrl.families.registry import FAMILIES
from invrl.host.network.direct_connections import THIS_MACHINE, bypass_proxies
from invrl.host.output.utf8_mode import use_utf8
from invrl.host.processes.environment_keys import hold_keys
from invrl.run.settings.run_config import ModelConfig
from invrl.user_code.model_folder import check_is_folder, check_model_folder

Settings = TypeVar("Settings")


def run_benchmark(run: Callable[[Sequence[str]], None], *, usage: str | None) -> int:
    """Run it with the arguments of this process, and return the exit code. With
    `--help` print the usage instead."""
    use_utf8()
    hold_keys()
    bypass_proxies(*THIS_MACHINE)
    arguments = sys.argv[1:]
    if "-h" in arguments or "--help" in arguments:
        print(usage)
        return 0
    return run_with_exit_code(lambda: run(arguments))


def model_folder(options: Mapping[str, str]) -> Path:
    """Raises ConfigError unless --model-path is a folder with a model that is
    supported."""
    if not options["--model-path"]:
        raise ConfigError("--model-path", "", "it is missing", "give a model folder")
    folder = ModelConfig(model_path=options["--model-path"]).folder
    check_is_folder("--model-path", options["--model-path"], folder)
    check_model_folder(folder, families=FAMILIES)
    return folder


def validated(
    settings: type[Settings], fields: Mapping[str, Any], *, name: str
) -> Settings:
    """The settings of the benchmark of this name. Raises ConfigError."""
    try:
        return TypeAdapter(settings).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        fix = f"see `python -m benchmarks.{name} --help`"
        raise ConfigError(
            f"{name} {field}", first["input"], first["msg"], fix
        ) from error
