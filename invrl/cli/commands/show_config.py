"""`invrl show-config`: prints the configuration that flags, preset and file resolve
to."""

from collections.abc import Sequence

from invrl.cli.flags import parse_flags
from invrl.run.settings.config import resolve


def show_config(arguments: Sequence[str]) -> None:
    """usage: invrl show-config [--config FILE] [flags]

    example:
      invrl show-config --algorithm-preset dapo --lr 3e-5 > my.toml"""
    config = resolve(*parse_flags(arguments))
    print(config.to_toml(), end="")
