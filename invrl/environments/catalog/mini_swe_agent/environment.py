"""mini-swe-agent, unmodified: it repairs a small repository, whose tests are the reward.

    sandbox     "bubblewrap" (needs bwrap; the network stays open) or "local" (no
                isolation: the model's commands run as you)
    step_limit  calls of the model in one episode
    timeout_s   seconds of one command

A task with "repository", "issue" and "test" brings its own: a folder, which is copied;
what to do; a command, run in the copy after the agent, that succeeds if it is done. Of
a seed alone the repository is a small module with one of several errors. Reward: 1 if
the test command succeeds, else 0.
"""

import os
import shutil
import tempfile
from pathlib import Path

REWARD = (0.0, 1.0)
TIMEOUT_S = 900.0
_MODULE = '''"""Closed intervals of whole numbers."""


def length(low, high):
    return high - low + 1


def overlap(first, second):
    low = max(first[0], second[0])
    high = min(first[1], second[1])
    return (low, high) if low <= high else None


def merged(intervals):
    result = []
    for low, high in sorted(intervals):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return result
'''
_ERRORS = [
    ("high - low + 1", "high - low", "length(3, 3) must be 1"),
    ("low <= high else", "low < high else", "overlap((1, 2), (2, 5)) must be (2, 2)"),
    ("sorted(intervals)", "intervals", "merged([(5, 6), (1, 2)]) is not in order"),
    ("max(high, result", "min(high, result", "merged([(1, 4), (2, 9)]) loses numbers"),
]
"""What an error replaces, the error, and the issue that reports it."""
_PASSED = 42
"""Exit code at the end of the test: a module that exits with 0 has not passed."""
_TEST = f"""
from intervals import length, merged, overlap

assert length(3, 3) == 1 and length(2, 5) == 4
assert overlap((1, 2), (2, 5)) == (2, 2) and overlap((1, 2), (3, 4)) is None
assert merged([(5, 6), (1, 2)]) == [(1, 2), (5, 6)]
assert merged([(1, 4), (2, 9)]) == [(1, 9)]
assert merged([(1, 9), (2, 3)]) == [(1, 9)]
raise SystemExit({_PASSED})
"""
_APART = ["--unshare-pid", "--unshare-ipc", "--die-with-parent"]
"""Commands neither see nor signal our processes, and what they start ends with them,
also at their deadline."""


def episode(
    model,
    task,
    *,
    sandbox: str = "bubblewrap",
    step_limit: int = 20,
    timeout_s: int = 30,
):
    # read when the packages are imported
    os.environ.setdefault("MSWEA_COST_TRACKING", "ignore_errors")
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
    os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "2")
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import get_config_path
    from minisweagent.models.litellm_model import LitellmModel

    config = yaml.safe_load(get_config_path("mini").read_text(encoding="utf-8"))
    endpoint = {"api_base": model.base_url, "api_key": model.key}
    settings = {
        **config["model"],
        "model_name": f"openai/{model.name}",
        "model_kwargs": {**config["model"]["model_kwargs"], **endpoint},
    }
    templates = {
        name: config["agent"][name] for name in ("system_template", "instance_template")
    }
    with tempfile.TemporaryDirectory() as folder:
        issue, test = _prepare(Path(folder), task)
        place = _place(sandbox, folder, timeout_s)
        agent = DefaultAgent(
            LitellmModel(**settings),
            place,
            step_limit=step_limit,
            cost_limit=0,
            **templates,
        )
        end = agent.run(issue)
        test_passed = _passes(test, place, timeout_s)
    return {
        "reward": float(test_passed),
        "components": {
            "tests": float(test_passed),
            "submitted": float(end.get("exit_status") == "Submitted"),
            "model_calls": float(agent.n_calls),
        },
        "messages": agent.messages,
    }


def _prepare(folder: Path, task: dict) -> tuple[str, str]:
    """Fill the folder; return the issue and the test command."""
    if "repository" in task:
        shutil.copytree(task["repository"], folder, dirs_exist_ok=True)
        return task["issue"], task["test"]
    right, wrong, issue = _ERRORS[task["seed"] % len(_ERRORS)]
    module = _MODULE.replace(right, wrong)
    folder.joinpath("intervals.py").write_text(module, encoding="utf-8")
    test = f"python3 - <<'END'{_TEST}END\n[ $? -eq {_PASSED} ]"
    return f"In intervals.py: {issue}. Repair it.", test


def _place(sandbox: str, folder: str, timeout_s: int):
    """Return mini-swe-agent's own environment, in the folder."""
    if sandbox == "local":
        from minisweagent.environments.local import LocalEnvironment

        return LocalEnvironment(cwd=folder, timeout=timeout_s)
    from minisweagent.environments.extra.bubblewrap import (
        BubblewrapEnvironment,
        BubblewrapEnvironmentConfig,
    )

    if shutil.which("bwrap") is None:
        raise RuntimeError("there is no bwrap: install bubblewrap, or sandbox=local")
    arguments = [*BubblewrapEnvironmentConfig().wrapper_args, *_APART]
    return BubblewrapEnvironment(cwd=folder, timeout=timeout_s, wrapper_args=arguments)


def _passes(test: str, place, timeout_s: int) -> bool:
    """Run the test where the agent's commands ran. What the test prints is the agent's:
    it must not count as the agent's submission, which is an exception."""
    command = f"({test}\n) > /dev/null 2>&1"
    return place.execute({"command": command}, timeout=timeout_s)["returncode"] == 0
