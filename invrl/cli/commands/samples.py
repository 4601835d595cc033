"""`invrl samples`: shows rollouts of a run."""

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from invrl.cli.arguments import read_options, read_run_folder, read_whole
from invrl.errors import ConfigError
from invrl.observe.samples.samples import (
    Sample,
    by_reward,
    first_ids,
    read_samples,
    spread,
    steps_with_purpose,
)
from invrl.observe.samples.samples_text import describe_samples, samples_json
from invrl.run.checkpoints.store_check import check_store
from invrl.run.settings.config import nearest
from invrl.run.settings.resolved_config import load_resolved
from invrl.store.run_store import RunStore

Order = Literal["", "worst", "best", "failed"]
Purpose = Literal["train", "eval", "serve"]
StepChoice = int | Literal["last", "all"]

_ORDERS: tuple[Order, ...] = ("worst", "best", "failed")
_SWITCHES = tuple(f"--{name}" for name in (*_ORDERS, "eval", "full", "json"))
_VALUES = ("--step", "--task", "--limit", "-n")
_DEFAULT_LIMIT = 5
_PURPOSE_NAMES = {"train": "training", "eval": "held-out", "serve": "served"}
_MANY_STEPS = 12
"""Steps up to which a message lists all of them, not only the first ones and the
last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesQuery:
    """Flags of the command."""

    step: StepChoice | None = None
    """None if not given."""
    task: str | None = None
    order: Order = ""
    held_out: bool = False
    limit: int = _DEFAULT_LIMIT
    """0: all."""
    full: bool = False
    as_json: bool = False


def samples(arguments: Sequence[str]) -> None:
    """usage: invrl samples RUN_FOLDER [--step N|last|all] [--task ID] [--eval]
                                    [--worst | --best | --failed]
                                    [-n N] [--full] [--json]
      --step N    the rollouts that step N trained (0: the evaluation before training); 'all': every
                  rollout of the run, dropped and failed ones too. Default: the last step; 'all' with
                  --task and --failed
      --task ID   of one task, in all epochs (`invrl ledger RUN_FOLDER` lists them)
      --worst     the lowest rewards first; --best: the highest
      --failed    rollouts that failed, and what they say
      --eval      held-out rollouts in place of training ones
      -n N, --limit N   how many to show (default: 5; 0: all); without --worst or --best evenly spread
                  over them all
      --full      texts as long as they are
      --json      a JSON list, with everything
    Reads only, so the run may still be running. Control characters in the model's text are shown as
    escapes."""
    folder = read_run_folder(arguments)
    query = read_query(arguments[1:])
    check_store(folder.store_path)
    rules = load_resolved(folder.config_path).buffer.failures.rules()
    run_samples = read_samples(folder.store_path, rules)
    with contextlib.closing(RunStore(folder.store_path)) as store:
        print(samples_output(query, run_samples, store))


def read_query(arguments: Sequence[str]) -> SamplesQuery:
    """Return the flags after RUN_FOLDER as a query. Raises ConfigError for a flag that
    is unknown, lacks its value, or contradicts another one."""
    options = read_options(arguments, _VALUES, _SWITCHES)
    limit = options.get("--limit", options.get("-n", str(_DEFAULT_LIMIT)))
    return SamplesQuery(
        step=_read_step(options.get("--step")),
        task=options.get("--task"),
        order=_read_order(options),
        held_out="--eval" in options,
        limit=read_whole(
            "--limit", limit, reason="not a number", fix="give --limit N; 0: all"
        ),
        full="--full" in options,
        as_json="--json" in options,
    )


def _read_order(options: Collection[str]) -> Order:
    orders: list[Order] = [order for order in _ORDERS if f"--{order}" in options]
    if len(orders) > 1:
        flags = " ".join(f"--{order}" for order in orders)
        raise ConfigError(
            "command line", flags, "they exclude each other", "give one of them"
        )
    return orders[0] if orders else ""


def _read_step(text: str | None) -> StepChoice | None:
    if text is None or text == "last" or text == "all":
        return text
    fix = "give a number, last or all"
    return read_whole("--step", text, reason="not a step", fix=fix)


def samples_output(
    query: SamplesQuery, samples: Sequence[Sample], store: RunStore
) -> str:
    """Return the output of the command. Raises ConfigError for a step or a task that
    the run does not have, and if there is nothing to show."""
    if not samples:
        reason = "no rollout of this run has ended yet"
        raise ConfigError(
            "RUN", "", reason, "wait for the first one, or look at the run's log"
        )
    of_task = _select_task(query, samples)
    chosen, heading = _select_step(query, of_task)
    if query.order == "failed":
        chosen = [sample for sample in chosen if sample.failure is not None]
    if query.order in ("worst", "best"):
        shown = by_reward(chosen, query.limit, best=query.order == "best")
    else:
        shown = spread(chosen, query.limit)
    if not shown:
        reason = "there is no rollout with a reward"
        if query.order == "failed":
            reason = "there is no rollout that failed"
        raise ConfigError(f"--{query.order}", heading, reason, "leave it out")
    if query.as_json:
        return samples_json(shown, store)
    return describe_samples(shown, store, total=chosen, where=heading, full=query.full)


def _select_task(query: SamplesQuery, samples: Sequence[Sample]) -> list[Sample]:
    if query.task is None:
        return list(samples)
    names = first_ids(sample.identity.task_id for sample in samples)
    of_task = [
        sample
        for sample in samples
        if query.task in (sample.identity.task_id, names[sample.identity.task_id])
    ]
    if not of_task:
        task_ids = {sample.identity.task_id for sample in samples}
        reason = f"no rollout of this task has ended; the run has rollouts of {len(task_ids)} tasks"
        fix = nearest(
            query.task,
            task_ids,
            many="`invrl ledger RUN --tasks` lists those of training",
        )
        raise ConfigError("--task", query.task, reason, fix)
    return of_task


def _select_step(
    query: SamplesQuery, samples: Sequence[Sample]
) -> tuple[list[Sample], str]:
    """Return the rollouts of the step, and a heading that describes them."""
    trained = steps_with_purpose(samples, "train")
    evaluated = steps_with_purpose(samples, "eval")
    purpose = _purpose(query, samples, trained)
    steps = trained
    if purpose == "eval":
        steps = evaluated
    of_purpose = [sample for sample in samples if sample.purpose == purpose]
    prefix = ""
    if query.task is not None:
        prefix = f"task {query.task}, "
    step = query.step
    if step is None:
        shows_all = query.task is not None or query.order == "failed"
        step = "all" if shows_all else "last"
    if step == "all":
        return of_purpose, f"{prefix}all {_PURPOSE_NAMES[purpose]} rollouts"
    if step == "last":
        if not steps:
            name = _PURPOSE_NAMES[purpose]
            return (
                of_purpose,
                f"{prefix}{name} rollouts (no step has trained on them yet)",
            )
        step = steps[-1]
    if step not in steps:
        fix = _step_fix(steps, evaluated)
        raise ConfigError("--step", step, _describe_steps(trained, evaluated), fix)
    heading = f"{prefix}step {step}"
    if purpose == "eval":
        heading = f"{prefix}evaluation after step {step}"
    if step == steps[-1]:
        heading += ", the last"
    if purpose != "eval" and query.step is None:
        untrained = sum(sample.step is None for sample in of_purpose)
        if untrained:
            heading += f"; {untrained:,} more were not trained: --step all"
    return [sample for sample in of_purpose if sample.step == step], heading


def _purpose(
    query: SamplesQuery, samples: Sequence[Sample], trained: Sequence[int]
) -> Purpose:
    """Return the purpose of the rollouts to show: training, unless the flags ask for
    others or there are none."""
    purposes = {sample.purpose for sample in samples}
    if query.held_out:
        if "eval" in purposes:
            return "eval"
        fix = "leave it out; runs with --eval.tasks have some"
        raise ConfigError("--eval", "", "no held-out rollout has ended", fix)
    if "train" not in purposes:
        if "eval" in purposes:
            return "eval"
        return "serve"
    # For example step 0, the evaluation before training.
    names_other_step = isinstance(query.step, int) and query.step not in trained
    if names_other_step and "eval" in purposes:
        return "eval"
    return "train"


def _describe_steps(trained: Sequence[int], evaluated: Sequence[int]) -> str:
    text = "no step has been trained yet"
    if trained:
        text = f"the run has trained {_ranges(trained)}"
    if evaluated:
        text += f" and was evaluated after {_ranges(evaluated)}"
    return text


def _step_fix(steps: Sequence[int], evaluated: Sequence[int]) -> str:
    if not steps:
        return "leave --step out"
    fix = f"give --step {steps[-1]}, or one of the others"
    if evaluated:
        fix += "; --eval for held-out rollouts"
    return fix


def _ranges(steps: Sequence[int]) -> str:
    """Return "steps 1 to 12", or "steps 0, 5, 10" if some between are missing."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    has_no_gap = steps[-1] - steps[0] == len(steps) - 1
    if len(steps) > 2 and has_no_gap:
        return f"steps {steps[0]} to {steps[-1]}"
    if len(steps) > _MANY_STEPS:
        first_steps = ", ".join(str(step) for step in steps[:5])
        return f"steps {first_steps}, ... {steps[-1]}"
    listed = ", ".join(str(step) for step in steps)
    return f"steps {listed}"
