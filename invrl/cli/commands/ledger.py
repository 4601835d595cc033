"""`invrl ledger`: the fate of every rollout of a run, even of a failed one."""

import shlex
import time
from collections import Counter
from collections.abc import Sequence

from invrl.buffer.ledger.ledger_store import (
    Incarnation,
    StoredEntry,
    check_lineage,
    read_incarnations,
    read_ledger,
)
from invrl.cli.arguments import read_arguments, read_run_folder, unknown_flag
from invrl.errors import BufferStateError, ConfigError
from invrl.host.output.printable import printable
from invrl.observe.samples.samples_text import count_text
from invrl.run.checkpoints.store_check import check_store
from invrl.run.settings.config import nearest

_TASKS_SHOWN = 20


def ledger(arguments: Sequence[str]) -> None:
    """usage: invrl ledger RUN_FOLDER [--tasks | --task ID]

    Without a flag: how many rollouts were trained or dropped, why, over which
    incarnations of the run, and the ids of the first tasks (--tasks: of all). With
    --task ID (or ID alone): each transition of its rollouts. A run that continues from
    a checkpoint is a new incarnation; what the incarnation before did after that
    checkpoint is lost, and leased again."""
    folder = read_run_folder(arguments)
    options, task_ids = read_arguments(arguments[1:], ["--task"], ["--tasks"])
    all_tasks = "--tasks" in options
    task_id = options.get("--task")
    if task_id is None and task_ids:
        task_id = task_ids.pop(0)
    if task_ids:
        raise unknown_flag(task_ids[0], ["--task", "--tasks"])
    check_store(folder.store_path)
    entries = read_ledger(folder.store_path)
    if task_id is not None:
        _check_task(task_id, entries, run=arguments[0])
        print(printable(describe_task(entries, task_id)))
        return
    tasks = describe_tasks(entries, whole=all_tasks)
    if all_tasks:
        print(printable(tasks))
        return
    incarnations = read_incarnations(folder.store_path)
    run = describe_run(incarnations, entries, ended=folder.finished_path.exists())
    print(printable(f"{run}\n{tasks}"))


def _check_task(task_id: str, entries: Sequence[StoredEntry], *, run: str) -> None:
    known_ids = {kept.entry.task_id for kept in entries}
    if task_id not in known_ids:
        reason = f"the run leased {len(known_ids)} tasks, and this is not one of them"
        listing = f"`invrl ledger {shlex.quote(run)} --tasks` lists them"
        fix = nearest(task_id, known_ids, many=listing)
        raise ConfigError("--task", task_id, reason, fix)


def describe_run(
    incarnations: Sequence[Incarnation], entries: Sequence[StoredEntry], *, ended: bool
) -> str:
    """Describe the incarnations, the number of rollouts by their last state and its
    reason, and whether each rollout ended exactly once."""
    lines = [f"{count_text(len(incarnations), 'incarnation')}:"]
    for incarnation in incarnations:
        lost = sum(
            kept.lost for kept in entries if kept.incarnation == incarnation.number
        )
        lines.append(_describe_incarnation(incarnation, lost=lost))
    last_entries = _last_entries(entries)
    counts: Counter[str] = Counter()
    for kept in last_entries:
        facts = [kept.entry.state, kept.entry.reason, kept.entry.failure]
        counts[": ".join(fact for fact in facts if fact)] += 1
    lines.append(f"{len(last_entries)} rollouts of the surviving lineage:")
    for facts, count in counts.most_common():
        lines.append(f"  {count:>8}  {facts}")
    try:
        check_lineage(entries, ended=ended)
        lines.append("each is in at most one training batch and ends once: yes")
    except BufferStateError as error:
        lines.append(f"BROKEN: {error}")
    return "\n".join(lines)


def _describe_incarnation(incarnation: Incarnation, *, lost: int) -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incarnation.started_at))
    origin = "from the start"
    if incarnation.parent:
        origin = f"from step {incarnation.step} of incarnation {incarnation.parent}"
    line = f"  incarnation {incarnation.number}: {started}, {origin}"
    if lost:
        line += f"; {lost} entries lost"
    return line


def describe_tasks(entries: Sequence[StoredEntry], *, whole: bool) -> str:
    """Describe the tasks of the surviving lineage, in the order in which they were
    first leased: the id of each, and the number of its rollouts in each state. `whole`:
    all tasks, not only the first ones."""
    states: dict[str, Counter[str]] = {}
    for kept in _last_entries(entries):
        states.setdefault(kept.entry.task_id, Counter())[kept.entry.state] += 1
    task_ids = list(states)
    shown_ids = task_ids
    if not whole:
        shown_ids = task_ids[:_TASKS_SHOWN]
    width = max((len(task_id) for task_id in shown_ids), default=0)
    lines = [
        f"{count_text(len(task_ids), 'task')} (--task ID shows what became of one):"
    ]
    for task_id in shown_ids:
        counts = ", ".join(
            f"{count} {state}" for state, count in states[task_id].most_common()
        )
        lines.append(f"  {task_id:<{width}}  {counts}")
    if len(shown_ids) < len(task_ids):
        lines.append(f"  and {len(task_ids) - len(shown_ids)} more: --tasks lists all")
    return "\n".join(lines)


def _last_entries(entries: Sequence[StoredEntry]) -> list[StoredEntry]:
    """Return the newest entry of each place in a group, in the order in which the
    places were first leased. Lost entries are left out."""
    last = {kept.entry.place: kept for kept in entries if not kept.lost}
    return list(last.values())


def describe_task(entries: Sequence[StoredEntry], task_id: str) -> str:
    """Describe every transition of every rollout of one task, in order; lost ones are
    marked."""
    of_task = [kept for kept in entries if kept.entry.task_id == task_id]
    of_task.sort(key=_rollout_order)
    lines: list[str] = []
    place = None
    for kept in of_task:
        if kept.entry.place != place:
            place = kept.entry.place
            lines.append(
                f"group {place.group_id}, rollout {place.index}, attempt {place.attempt}:"
            )
        lines.append(_describe_transition(kept))
    return "\n".join(lines)


def _rollout_order(kept: StoredEntry) -> tuple[str, int, int]:
    place = kept.entry.place
    return place.group_id, place.index, kept.incarnation


def _describe_transition(kept: StoredEntry) -> str:
    entry = kept.entry
    facts = [entry.reason, entry.failure, entry.detail, entry.session_id]
    if entry.batch_id is not None:
        facts.append(f"batch {entry.batch_id}")
    time_of_day = time.strftime("%H:%M:%S", time.localtime(kept.at))
    known_facts = ", ".join(fact for fact in facts if fact)
    line = f"  {time_of_day}  {entry.state:<10}{known_facts}"
    if kept.lost:
        line += f"  (incarnation {kept.incarnation}, lost)"
    return line
