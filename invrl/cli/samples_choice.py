"""What `invrl samples` was asked, and its answer: which rollouts of a run are shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from invrl.errors import ConfigError
from invrl.observe.samples import (
    Sample,
    by_reward,
    changes,
    evaluated_steps,
    first_ids,
    spread,
    trained_steps,
)
from invrl.observe.samples_text import changes_json, describe_changes, describe_samples, samples_json
from invrl.run.config import nearest
from invrl.store.run_store import RunStore

Order = Literal["", "worst", "best", "changed", "failed"]
_ORDERS: tuple[Order, ...] = ("worst", "best", "changed", "failed")
_SWITCHES = ("eval", "full", "json")
_VALUES = ("--step", "--task", "--limit", "-n")
_DEFAULT_LIMIT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesQuery:
    """The flags of the command."""

    step: int | Literal["last", "all"] | None = None
    """None: not given."""
    task: str | None = None
    order: Order = ""
    held_out: bool = False
    limit: int = _DEFAULT_LIMIT
    """0: all."""
    full: bool = False
    as_json: bool = False


def read_query(arguments: Sequence[str]) -> SamplesQuery:
    """The flags after RUN_FOLDER. Raises ConfigError for one that is unknown, lacks its value, or contradicts
    another."""
    from invrl.cli.flags import take_value

    values: dict[str, str] = {}
    switches: list[str] = []
    rest = list(arguments)
    known_switches = [f"--{name}" for name in (*_ORDERS, *_SWITCHES)]
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag in _VALUES:
            name = "--limit" if flag == "-n" else flag
            values[name] = take_value(flag, value if equals else None, rest)
        elif flag in known_switches and not equals:
            switches.append(flag.removeprefix("--"))
        else:
            known = [*_VALUES, *known_switches]
            raise ConfigError("command line", flag, "no such flag", nearest(flag, known))
    orders: list[Order] = [name for name in _ORDERS if name in switches]
    if len(orders) > 1:
        given = " ".join(f"--{name}" for name in orders)
        raise ConfigError("command line", given, "they exclude each other", "give one of them")
    order = orders[0] if orders else ""
    step = _step(values.get("--step"))
    if order == "changed" and step is not None:
        reason = "--changed compares the first time of a task with its last, over the whole run"
        raise ConfigError("--step", step, reason, "leave --step out")
    return SamplesQuery(
        step=step,
        task=values.get("--task"),
        order=order,
        held_out="eval" in switches,
        limit=_limit(values.get("--limit")),
        full="full" in switches,
        as_json="json" in switches,
    )


def _step(text: str | None) -> int | Literal["last", "all"] | None:
    if text is None or text == "last" or text == "all":
        return text
    if not text.isdecimal():
        raise ConfigError("--step", text, "not a step", "give a number, last or all")
    return int(text)


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    if not text.isdecimal():
        raise ConfigError("--limit", text, "not a number", "give --limit N; 0: all")
    return int(text)


def answer(query: SamplesQuery, samples: Sequence[Sample], store: RunStore) -> str:
    """What the command prints. Raises ConfigError for a step or a task that the run does not have, and where
    there is nothing to show."""
    if not samples:
        reason = "no rollout has ended in it so far"
        raise ConfigError("RUN", "", reason, "wait for the first one, or look at the run's log")
    chosen = _of_task(query, samples)
    if query.order == "changed":
        return _changes(query, chosen, store)
    chosen, where = _of_step(query, chosen)
    if query.order == "failed":
        chosen = [one for one in chosen if one.failure is not None]
    if query.order in ("worst", "best"):
        shown = by_reward(chosen, query.limit, best=query.order == "best")
    else:
        shown = spread(chosen, query.limit)
    if not shown:
        kind = "that failed" if query.order == "failed" else "with a reward"
        raise ConfigError("--" + query.order, where, f"there is no rollout {kind}", "leave it out")
    if query.as_json:
        return samples_json(shown, store)
    return describe_samples(shown, store, total=chosen, where=where, full=query.full)


def _of_task(query: SamplesQuery, samples: Sequence[Sample]) -> list[Sample]:
    if query.task is None:
        return list(samples)
    names = first_ids(one.task_id for one in samples)
    of_task = [one for one in samples if query.task in (one.task_id, names[one.task_id])]
    if not of_task:
        tasks = {one.task_id for one in samples}
        reason = f"no rollout of it has ended; the run has those of {len(tasks)} tasks"
        fix = nearest(query.task, tasks, many="`invrl ledger RUN --tasks` lists those of training")
        raise ConfigError("--task", query.task, reason, fix)
    return of_task


def _of_step(query: SamplesQuery, samples: Sequence[Sample]) -> tuple[list[Sample], str]:
    """The rollouts that are meant, and what a heading calls them."""
    trained, evaluated = trained_steps(samples), evaluated_steps(samples)
    kind = _kind(query, samples, trained)
    of_kind = [one for one in samples if one.purpose == kind]
    steps = evaluated if kind == "eval" else trained
    name = "" if query.task is None else f"task {query.task}, "
    wanted = query.step
    if wanted is None:
        wanted = "all" if query.task is not None or query.order == "failed" else "last"
    if wanted == "all":
        return of_kind, f"{name}all {_KINDS[kind]} rollouts"
    if wanted == "last" and not steps:
        return of_kind, f"{name}{_KINDS[kind]} rollouts (no step has been made of them so far)"
    step = steps[-1] if wanted == "last" else wanted
    if step not in steps:
        raise ConfigError(
            "--step", step, _steps_there(trained, evaluated), _step_fix(kind, trained, evaluated)
        )
    last = ", the last" if step == steps[-1] else ""
    of_step = [one for one in of_kind if one.step == step]
    if kind == "eval":
        return of_step, f"{name}evaluation after step {step}{last}"
    later = sum(one.step is None for one in of_kind)
    aside = f"; {later:,} more were not trained: --step all" if later and query.step is None else ""
    return of_step, f"{name}step {step}{last}{aside}"


_KINDS = {"train": "training", "eval": "held-out", "serve": "served"}


def _kind(
    query: SamplesQuery, samples: Sequence[Sample], trained: Sequence[int]
) -> Literal["train", "eval", "serve"]:
    """Training rollouts, unless others were asked for or there are only others."""
    purposes = {one.purpose for one in samples}
    if query.held_out and "eval" not in purposes:
        raise ConfigError(
            "--eval", "", "no held-out rollout has ended", "leave it out; runs with --eval-tasks have some"
        )
    if query.held_out or ("eval" in purposes and "train" not in purposes):
        return "eval"
    if "eval" in purposes and isinstance(query.step, int) and query.step not in trained:
        return "eval"  # step 0, the evaluation before training
    return "train" if "train" in purposes else "serve"


def _steps_there(trained: Sequence[int], evaluated: Sequence[int]) -> str:
    facts = ["no step has been trained yet"]
    if trained:
        facts = [f"the run has trained {_ranges(trained)}"]
    if evaluated:
        facts.append(f"and was evaluated after {_ranges(evaluated)}")
    return " ".join(facts)


def _step_fix(kind: str, trained: Sequence[int], evaluated: Sequence[int]) -> str:
    steps = evaluated if kind == "eval" else trained
    if not steps:
        return "leave --step out"
    fix = f"give --step {steps[-1]}, or one of the others"
    return f"{fix}; --eval for held-out rollouts" if evaluated else fix


def _ranges(steps: Sequence[int]) -> str:
    """ "steps 1 to 12", or "steps 0, 5, 10" where some between are missing."""
    name = "step" if len(steps) == 1 else "steps"
    if len(steps) > 2 and steps[-1] - steps[0] == len(steps) - 1:
        return f"{name} {steps[0]} to {steps[-1]}"
    if len(steps) > 12:
        return f"{name} {', '.join(map(str, steps[:5]))}, ... {steps[-1]}"
    return f"{name} {', '.join(map(str, steps))}"


def _changes(query: SamplesQuery, samples: Sequence[Sample], store: RunStore) -> str:
    wanted = [one for one in samples if one.purpose == "eval"] if query.held_out else samples
    found = changes(wanted, store)
    if not found:
        reason = "no task has been run under two different weights with another reward or reply"
        fix = "--eval-tasks measures held-out tasks before and after; a training task comes back each epoch"
        raise ConfigError("--changed", query.task or "", reason, fix)
    shown = found[: query.limit] if query.limit else found
    if query.as_json:
        return changes_json(shown, store)
    return describe_changes(shown, store, total=len(found), full=query.full)
