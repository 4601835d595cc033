"""One check of `invrl doctor` by its name, for tests of what it looks at."""

from __future__ import annotations

from invrl.cli.checks.checklist import CHECKS
from invrl.cli.checks.machine import inspect_machine
from invrl.run.settings.config import Config

USER_CODE = (
    "rollout function",
    "reward function",
    "held-out sets",
    "tasks",
    "algorithm functions",
)
"""What is given by import path, and the tasks."""


def run_check(name: str, config: Config) -> object:
    """What the check saw. Raises what it raises."""
    [check] = [check for check in CHECKS if check.name == name]
    return check.look(config, inspect_machine())
