"""`invrl doctor`: makes every check of a run's requirements, and prints each result
with its fix.

Invariants: a failed check does not keep the others from running. Only a check whose
input another one has found unusable is skipped, and its line says so. No check leaves
anything behind.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from invrl.cli.checks import machine
from invrl.cli.checks.check_warnings import CheckWarning, LikelyFailure
from invrl.cli.checks.checklist import Check, fitted, select_checks
from invrl.cli.checks.cluster_table import print_cluster
from invrl.cli.checks.machine import Machine
from invrl.cli.command import CommandFailed
from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError
from invrl.run.processes.driver_commands import FAILURE_EXIT
from invrl.run.settings.config import Config, Source, resolve

_CONFIGURATION = "configuration"


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    SKIPPED = "skipped"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check."""

    check: str
    status: Status
    value: str
    reason: str = ""
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.status:<8} {self.check}: {self.value}"
        if self.status in (Status.OK, Status.SKIPPED):
            return line
        return f"{line}: {self.reason}. Fix: {self.fix}"


def doctor(arguments: Sequence[str]) -> None:
    """usage: invrl doctor [--json | --cluster] [flags of `invrl train`]

    Prints one line per check, with the fix of what failed. Exit code 1 if any did.
    --json prints a list of {check, status, value, reason, fix}.
    --cluster asks every node of the Ray that RAY_ADDRESS names, and prints a table:
    versions, model, run folder, clock, ports, and what keeps the run from using it.

    example:
      invrl doctor --config quickstart --model-path MODEL"""
    if "--cluster" in arguments:
        flags = [argument for argument in arguments if argument != "--cluster"]
        if not print_cluster(flags):
            raise CommandFailed(FAILURE_EXIT)
        return
    as_json = "--json" in arguments
    flags = [argument for argument in arguments if argument != "--json"]
    findings = diagnose(flags, machine.inspect_machine())
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
    """Return one finding per check, and one per mistake in the configuration. A check
    is skipped if one that it needs has failed or was skipped."""
    config, mistakes = read_configuration(arguments)
    findings = [_from_error(_CONFIGURATION, mistake) for mistake in mistakes]
    if not mistakes:
        value = " ".join(arguments) or "defaults"
        findings.append(Finding(check=_CONFIGURATION, status=Status.OK, value=value))
        config = fitted(config, machine)
    not_passed: set[str] = set()
    for check in select_checks("doctor", config):
        if check.needs in not_passed:
            value = f"not checked: the check of the {check.needs} failed"
            finding = Finding(check=check.name, status=Status.SKIPPED, value=value)
        else:
            finding = _examine(check, config, machine)
        if finding.status in (Status.FAILED, Status.SKIPPED):
            not_passed.add(check.name)
        findings.append(finding)
    return findings


def _examine(check: Check, config: Config, machine: Machine) -> Finding:
    try:
        value = check.look(config, machine)
    except ConfigError as error:
        return _from_error(check.name, error)
    except Exception as error:  # a check that breaks must not hide the others
        reason = f"the check itself raised {type(error).__name__}: {error}"
        fix = "report this line"
        return Finding(
            check=check.name, status=Status.FAILED, value="?", reason=reason, fix=fix
        )
    text = "in order"
    if isinstance(value, str | Path):
        text = str(value)
    return Finding(check=check.name, status=Status.OK, value=text)


def _from_error(check: str, error: ConfigError) -> Finding:
    status = Status.FAILED
    if isinstance(error, CheckWarning) and not isinstance(error, LikelyFailure):
        status = Status.WARNING
    value = f"{error.field} = {error.value!r}"
    return Finding(
        check=check, status=status, value=value, reason=error.reason, fix=error.fix
    )


def read_configuration(arguments: Sequence[str]) -> tuple[Config, list[ConfigError]]:
    """Return the configuration without its mistakes, and the mistakes."""
    mistakes: list[ConfigError] = []
    sources = parse_flags(arguments, mistakes)
    while True:
        try:
            return resolve(*sources), mistakes
        except ConfigError as error:
            mistakes.append(error)
            sources = _without_field(sources, error.field)


def _without_field(sources: tuple[Source, ...], field: str) -> tuple[Source, ...]:
    """Return the sources without the setting that an error names, so that the next
    mistake can be found.

    If no source sets it, its default contradicts another value of its table: the whole
    table is left out. If no source has the table either, all sources are left out.
    """
    table, _, key = field.partition(".")
    for without in (
        tuple(_without(source, table, key) for source in sources),
        tuple(_without(source, table) for source in sources),
    ):
        if without != sources:
            return without
    return ()


def _without(source: Source, table: str, key: str = "") -> Source:
    """Return the source without one key of a table. An empty key stands for the whole
    table."""
    tables = {name: entries for name, entries in source.tables.items() if name != table}
    if key and table in source.tables:
        entries = source.tables[table].items()
        tables[table] = {name: value for name, value in entries if name != key}
    return replace(source, tables=tables)
