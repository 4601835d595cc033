"""What a node of a cluster has answered, and what of it keeps the run from using the node.
Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from invrl.errors import ConfigError
from invrl.run.hosts.node_report import NodeReport
from invrl.run.hosts.placement import Node

_MOST_CLOCK_GAP_S = 2.0
_SAME_INSTALLATION = "install the driver's version there"
_PACKAGES = {
    "engines": ("torch", "sglang"),
    "trainer": ("torch", "megatron-core"),
}
"""Packages that a role needs besides invrl and Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """A node and what it answered."""

    node: Node
    roles: Sequence[str]
    """Roles of the run that it may have; empty: the run does not use it."""
    report: NodeReport | None
    """None: it did not answer."""
    failure: str = ""
    """Why it did not answer."""
    clock_gap_s: float | None = None
    """Its clock minus the driver's; None if its connection was not seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeeds:
    """What the run needs of its nodes, as the driver has it."""

    driver: NodeReport
    engines_open_files: bool
    """Whether engines read new weights in the run's folder."""


def node_faults(answer: NodeAnswer, needs: NodeNeeds) -> Iterator[ConfigError]:
    """Yield what keeps the run from using a node."""
    if not answer.roles:
        return

    def fault(name: str, value: object, reason: str, fix: str) -> ConfigError:
        return ConfigError(f"{name} of node {answer.node}", value, reason, fix)

    report = answer.report
    if report is None:
        fix = "look at the node and at Ray's logs there, or place the run elsewhere"
        yield fault("answer", "none", answer.failure, fix)
        return
    if report.port_fault:
        fix = "open the ports between the nodes in both directions, or start their Ray with other addresses"
        yield fault("ports", "closed", report.port_fault, fix)
    needed = [name for role in answer.roles for name in _PACKAGES.get(role, ())]
    for package in dict.fromkeys(["invrl", "python", *needed]):
        found = _comparable(package, report.versions)
        wanted = _comparable(package, needs.driver.versions)
        if found != wanted:
            value = report.versions.get(package, "not installed")
            reason = f"the driver has {needs.driver.versions.get(package, 'none')}"
            yield fault(package, value, reason, _SAME_INSTALLATION)
    if report.model != needs.driver.model:
        reason = f"the checksum of the model's config.json is {needs.driver.model} on the driver's node"
        fix = "put the driver's model folder there under the same path"
        yield fault("model", report.model, reason, fix)
    if not report.sees_run_folder:
        yield from _unshared(answer, needs, fault)
    gap_s = answer.clock_gap_s
    if gap_s is not None and abs(gap_s) > _MOST_CLOCK_GAP_S:
        reason = f"it differs from the driver's by more than {_MOST_CLOCK_GAP_S:g} s"
        fix = "set both by NTP: logs and traces are compared by time"
        yield fault("clock", f"{gap_s:+.1f} s", reason, fix)


def _unshared(
    answer: NodeAnswer, needs: NodeNeeds, fault: Callable[..., ConfigError]
) -> Iterator[ConfigError]:
    """Yield the fault of a run folder that a node does not see, if its roles use it."""
    uses = {
        "trainer": "trainer ranks write checkpoints into it",
        "workers": "rollout workers write their logs into it",
    }
    fix = "share --run-root between the nodes, by NFS or the like"
    if needs.engines_open_files:
        uses["engines"] = "engines open new weights in it"
        if "trainer" not in answer.roles:
            fix += ", or add --weights.host with the driver's address"
    for role in answer.roles:
        if role in uses:
            reason = f"{uses[role]}, and it is not the driver's there"
            yield fault("run folder", "not shared", reason, fix)
            return


def _comparable(package: str, versions: Mapping[str, str]) -> str:
    """Return the part of a version that must be equal: of Python's without its last
    number, of torch's without its device."""
    text = versions.get(package, "")
    if package == "python":
        return text.rpartition(".")[0]
    return text.partition("+")[0]
