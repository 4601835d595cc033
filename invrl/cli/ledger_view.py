"""`invrl ledger RUN [--task ID]`: what became of every rollout of a run, a dead one too."""

import time
from collections import Counter
from collections.abc import Sequence

from invrl.buffer.ledger_store import Incarnation, KeptEntry, check_lineage
from invrl.errors import BufferStateError


def describe_run(incarnations: Sequence[Incarnation], kept: Sequence[KeptEntry], *, ended: bool) -> str:
    """Incarnations, how many rollouts ended in which state and why, and whether each did so exactly once."""
    lines = ["1 incarnation:" if len(incarnations) == 1 else f"{len(incarnations)} incarnations:"]
    for incarnation in incarnations:
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incarnation.started_at))
        lost = sum(one.lost for one in kept if one.incarnation == incarnation.number)
        origin = (
            f"from step {incarnation.step} of incarnation {incarnation.parent}"
            if incarnation.parent
            else "from the start"
        )
        lines.append(
            f"  incarnation {incarnation.number}: {begun}, {origin}"
            + (f"; {lost} entries lost" if lost else "")
        )
    last = {one.entry.place: one.entry for one in kept if not one.lost}
    counts = Counter(": ".join(filter(None, (e.state, e.reason, e.failure))) for e in last.values())
    lines += [f"{len(last)} rollouts of the surviving lineage:"]
    lines += [f"  {number:>8}  {name}" for name, number in counts.most_common()]
    try:
        check_lineage(kept, ended=ended)
        lines.append("each is in at most one training batch and ends once: yes")
    except BufferStateError as error:
        lines.append(f"BROKEN: {error}")
    return "\n".join(lines)


_TASKS_SHOWN = 20


def describe_tasks(kept: Sequence[KeptEntry], *, whole: bool) -> str:
    """The tasks of the surviving lineage, in the order in which they were first leased: the id of each, and
    how many of its rollouts are in which state. Without `whole` the first ones only."""
    last = {one.entry.place: one.entry for one in kept if not one.lost}
    states: dict[str, Counter[str]] = {}
    for entry in last.values():
        states.setdefault(entry.task_id, Counter())[entry.state] += 1
    ids = list(states) if whole else list(states)[:_TASKS_SHOWN]
    width = max((len(task_id) for task_id in ids), default=0)
    lines = [f"{len(states)} {'task' if len(states) == 1 else 'tasks'} (--task ID shows what became of one):"]
    for task_id in ids:
        counts = ", ".join(f"{number} {state}" for state, number in states[task_id].most_common())
        lines.append(f"  {task_id:<{width}}  {counts}")
    if len(ids) < len(states):
        lines.append(f"  and {len(states) - len(ids)} more: --tasks lists all")
    return "\n".join(lines)


def describe_task(kept: Sequence[KeptEntry], task_id: str) -> str:
    """Every transition of every rollout of one task, in order, lost ones marked."""
    lines: list[str] = []
    place = None
    of_task = [one for one in kept if one.entry.task_id == task_id]
    for one in sorted(
        of_task, key=lambda one: (one.entry.place.group_id, one.entry.place.index, one.incarnation)
    ):
        entry = one.entry
        if entry.place != place:
            place = entry.place
            lines.append(f"group {place.group_id}, rollout {place.index}, attempt {place.attempt}:")
        batch = "" if entry.batch_id is None else f"batch {entry.batch_id}"
        facts = [entry.reason, entry.failure, entry.detail, entry.session_id, batch]
        at = time.strftime("%H:%M:%S", time.localtime(one.at))
        mark = f"  (incarnation {one.incarnation}, lost)" if one.lost else ""
        lines.append(f"  {at}  {entry.state:<10}" + ", ".join(filter(None, facts)) + mark)
    return "\n".join(lines)
