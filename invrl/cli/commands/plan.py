"""`invrl plan`: how fast a run can be, and the settings that make it so."""

from collections.abc import Iterator, Sequence

from pydantic import ValidationError

from invrl.cli.arguments import read_run_folder, split_options, unknown_flag
from invrl.errors import ConfigError
from invrl.run.plan.config import PlanConfig
from invrl.run.plan.plan import Plan, make_plan
from invrl.run.plan.recorded_workload import read_run

_FLAGS = {f"--{name.replace('_', '-')}": name for name in PlanConfig.model_fields}
_LENGTH_FLAGS = {"length_mean", "length_sigma"}
_ROW = "{:<14}{:<11}{:>8}{:>14}{:>16}{:>12}"


def plan(arguments: Sequence[str]) -> None:
    """usage: invrl plan [RUN_FOLDER] [flags]

    Prints how long a step takes at each staleness, where the bottleneck is, how old
    tokens become, and the flags to give. Lengths and rates are those of a recorded run,
    or of flags, which win:

      --length-mean TOKENS         mean length of a rollout
      --length-sigma S             deviation of the lengths' logarithm (1.0)
      --rollout-batch-size N       groups of a batch (16)
      --n-samples-per-prompt N     rollouts of a group (8)
      --num-engines N              engines now (1); --engine-gpus N: of each (1)
      --eval-engines N             engines set aside for evaluation, not counted above (0)
      --trainer-gpus N             GPUs of the trainer now (1)
      --token-s S                  seconds of an engine's step with one request
      --request-s S                seconds that each further request adds to that
      --training-s S               seconds of a training step on the trainer's GPUs now
      --update-s S                 seconds until the engines have new weights (0)
      --when-stale RULE            what becomes of a token that is too old (train)

    Engines and trainer must have GPUs of their own. The GPUs are divided anew; memory
    is not considered. It takes about a minute."""
    options, others = split_options(arguments, list(_FLAGS))
    run, *unknown = others or [""]
    for argument in (run, *unknown):
        if argument.startswith("--") or argument in unknown:
            raise unknown_flag(argument, list(_FLAGS))
    values: dict[str, object] = {_FLAGS[flag]: text for flag, text in options.items()}
    lengths = None
    if run:
        recorded, lengths = read_run(read_run_folder([run]))
        if _LENGTH_FLAGS & values.keys():
            lengths = None
        values = {**recorded.model_dump(), **values}
    config = _checked(values)
    print("\n".join(describe_plan(config, make_plan(config, lengths))))


def _checked(values: dict[str, object]) -> PlanConfig:
    try:
        return PlanConfig.model_validate(values)
    except ValidationError as error:
        finding = error.errors()[0]
    name = str(finding["loc"][0])
    flag = f"--{name.replace('_', '-')}"
    reason = finding["msg"]
    fix = f"give {PlanConfig.model_fields[name].description}"
    if finding["type"] == "missing":
        reason = "it is missing"
        fix += ", or a run folder that shows it"
    raise ConfigError(flag, values.get(name, ""), reason, fix)


def describe_plan(config: PlanConfig, plan: Plan) -> Iterator[str]:
    """Yield the lines for a person: the parts of a step, a row per staleness, and the
    flags."""
    workload = plan.workload
    trainer_s = workload.trainer_s
    packed_s = workload.packed_s
    yield (
        f"batch       {workload.rollouts} rollouts of {workload.mean_length:,.0f} tokens on average, "
        f"{workload.slots} at a time"
    )
    yield (
        f"GPUs        {config.engine_gpus * workload.num_engines} for engines ({workload.num_engines}), "
        f"{plan.trainer_gpus} for the trainer"
    )
    yield (
        f"generation  {packed_s:.3g} s with all slots in use, {workload.barrier_s:.3g} s of a batch alone"
    )
    yield f"trainer     {trainer_s:.3g} s with the weight update"
    yield (
        f"bound       {workload.best_step_s:.3g} s a step, {workload.bound:.2f} times as fast as synchronous"
    )
    yield ""
    yield _ROW.format(
        "max_staleness", "admission", "s/step", "of the bound", "token age mean", "99 %"
    )
    for estimate in plan.estimates:
        yield _ROW.format(
            estimate.max_staleness,
            estimate.admission,
            f"{estimate.step_s:.3g}",
            f"{workload.best_step_s / estimate.step_s:.0%}",
            f"{estimate.age_mean:.2f}",
            f"{estimate.age_p99:.0f}",
        )
    yield ""
    bottleneck, other = "the engines", "the trainer"
    ratio = packed_s / trainer_s
    if ratio < 1:
        bottleneck, other, ratio = other, bottleneck, 1 / ratio
    yield f"bottleneck: {bottleneck}; with {ratio:.2f} times that speed, {other}"
    best = plan.best
    flags = (
        f"--max-staleness {best.max_staleness} --admission {best.admission} "
        f"--rollout-concurrency {workload.slots} "
        f"--num-engines {workload.num_engines + config.eval_engines}"
    )
    if config.when_stale != "train" and best.max_staleness:
        flags += f" --when-stale {config.when_stale}"
    if config.eval_engines:
        flags += f" --eval.engines {config.eval_engines}"
    yield f"give: {flags}"
