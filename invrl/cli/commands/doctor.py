"""`invrl doctor`: every check of what a run needs, each with its fix.

Invariants: every check runs, whatever the others found, and none leaves anything behind."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

from invrl.cli import machine_checks
from invrl.cli.command import CommandFailed
from invrl.cli.flags import parse_flags
from invrl.cli.machine_checks import MACHINE_CHECKS, Doubt, Machine, packages_missing
from invrl.cli.run_checks import run_checks
from invrl.errors import ConfigError
from invrl.run.config import Config, Source, resolve
from invrl.run.driver_commands import FAILURE_EXIT
from invrl.run.folder import check_run_folder


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    status: Status
    value: str
    reason: str = ""
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.status:<8} {self.check}: {self.value}"
        return line if self.status is Status.OK else f"{line}: {self.reason}. Fix: {self.fix}"


def doctor(arguments: Sequence[str]) -> None:
    """usage: invrl doctor [--json] [flags of `invrl train`]

    Prints one line per check, with the fix of what failed. Exit code 1 if any did. --json prints a list
    of {check, status, value, reason, fix}.

    example:
      invrl doctor --config quickstart --model-path MODEL"""
    as_json = "--json" in arguments
    flags = [argument for argument in arguments if argument != "--json"]
    findings = diagnose(flags, machine_checks.look())
    print_findings(findings, as_json=as_json)
    if any(finding.status is Status.FAILED for finding in findings):
        raise CommandFailed(FAILURE_EXIT)


def print_findings(findings: Sequence[Finding], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    for finding in findings:
        print(finding)
    failed = sum(finding.status is Status.FAILED for finding in findings)
    print(f"{len(findings)} checks, {failed} failed")


def diagnose(arguments: Sequence[str], machine: Machine) -> list[Finding]:
    """One finding per check, and one per mistake in the configuration."""
    config, mistakes = read_configuration(arguments)
    findings = [_found("configuration", error) for error in mistakes]
    well = Finding(check="configuration", status=Status.OK, value=" ".join(arguments) or "defaults")
    checks = {name: partial(check, config, machine) for name, check in MACHINE_CHECKS.items()}
    checks = {**checks, "run folder": partial(check_run_folder, config), **run_checks(config)}
    return (findings or [well]) + [_examine(name, check) for name, check in checks.items()]


def _found(check: str, error: ConfigError) -> Finding:
    status = Status.WARNING if isinstance(error, Doubt) else Status.FAILED
    value = f"{error.field} = {error.value!r}"
    return Finding(check=check, status=status, value=value, reason=error.reason, fix=error.fix)


def _examine(name: str, check: Callable[[], object]) -> Finding:
    try:
        shown = str(seen) if isinstance(seen := check(), str | Path) else "as it should be"
        return Finding(check=name, status=Status.OK, value=shown)
    except ConfigError as error:
        return _found(name, error)
    except ImportError as error:
        return _found(name, packages_missing(error))
    except Exception as error:  # a check that breaks must not hide the others
        reason = f"the check itself raised {type(error).__name__}: {error}"
        return Finding(check=name, status=Status.FAILED, value="?", reason=reason, fix="report this line")


def read_configuration(arguments: Sequence[str]) -> tuple[Config, list[ConfigError]]:
    """The configuration without what is wrong in it, and all that is."""
    mistakes = list[ConfigError]()
    sources = parse_flags(arguments, mistakes)
    while True:
        try:
            return resolve(*sources), mistakes
        except ConfigError as error:
            mistakes.append(error)
            table, _, key = error.field.partition(".")
            left = tuple(_without(source, table, key) for source in sources)
            if left == sources:  # a default that a given value contradicts: none of its table is sure
                left = tuple(_without(source, table, "") for source in sources)
            sources = left if left != sources else ()


def _without(source: Source, table: str, key: str) -> Source:
    kept = {name: entries for name, entries in source.tables.items() if key or name != table}
    if table in kept:
        kept[table] = {name: value for name, value in kept[table].items() if name != key}
    return replace(source, tables=kept)
