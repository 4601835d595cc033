"""Import paths: what loads, and what each mistake is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from invrl.algorithms.advantages.advantages import ADVANTAGES, advantage_function
from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.policy_loss.policy_losses import (
    POLICY_LOSSES,
    policy_loss_function,
)
from invrl.buffer.groups.group_filters import group_filter_function
from invrl.errors import ConfigError, PluginError
from invrl.interfaces import GroupFilter, TaskSource
from invrl.rollout.config import EvalConfig, RolloutConfig
from invrl.rollout.tasks.tasks import load_eval_sets
from invrl.user_code.plugins import (
    is_group_form,
    load_plugin,
    load_reward_function,
    load_rollout_function,
)

GOOD = """
import functools

async def rollout(task, endpoint): return 1.0
def sync_rollout(task, endpoint, *, retries=3): return 1.0
def anything(*args, **kwargs): return 1.0
async def judged(task, endpoints): return [1.0]
judged.group = True
def reward(task, result): return 0.0
def tasks(split, seed): return iter(())
def keep(group): return None
def advantage(rewards_G, *, eps): return rewards_G
def loss(ratio_N, advantages_N, *, eps_clip_low, eps_clip_high): return -ratio_N

class Agent:
    def __init__(self, n): self.n = n
    async def __call__(self, task, endpoint): return self.n
    async def run(self, task, endpoint): return self.n
agent = Agent(3)
partial = functools.partial(lambda n, task, endpoint: n, 2)

def one_argument(task): return 1.0
def three(task, endpoint, model): return 1.0
def keyword_needed(task, endpoint, *, model): return 1.0
def no_eps(rewards_G): return rewards_G
def positional_eps(rewards_G, epsilon): return rewards_G
number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder as the working directory, not on the Python path."""
    (tmp_path / "my_agent.py").write_text(GOOD)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_package" / "rewards.py").write_text(
        "def exact(task, result): return 1.0\n"
    )
    (tmp_path / "my-agent.py").write_text("")
    (tmp_path / "json.py").write_text("")
    (tmp_path / "my_notes.txt").write_text("")
    (tmp_path / "raises.py").write_text("import os\n\n1 / 0\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "needs.py").write_text("import a_library_nobody_has\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    ["rollout", "sync_rollout", "anything", "agent", "agent.run", "partial", "judged"],
)
def test_valid_rollout_functions_load(here: Path, name: str) -> None:
    function = load_rollout_function(f"my_agent:{name}")
    assert callable(function)
    assert is_group_form(function) == (name == "judged")


@pytest.mark.parametrize(
    "form", ["my_agent.py", "./my_agent.py", "{here}/my_agent.py", "~/my_agent.py"]
)
def test_file_path_is_accepted_as_its_module(
    here: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(here))
    path = form.format(here=here)
    function = load_rollout_function(f"{path}:rollout")
    assert function is load_rollout_function("my_agent:rollout"), (
        "the same module, imported once"
    )


def test_every_import_path_setting_accepts_a_file_path(here: Path) -> None:
    (here / "my_package" / "rewards.py").write_text((here / "my_agent.py").read_text())
    file = "my_package/rewards.py"
    assert load_reward_function(f"{file}:reward").__module__ == "my_package.rewards"
    assert (
        list(load_plugin(f"{file}:tasks", "task_source_path", TaskSource)("train", 0))
        == []
    )
    assert group_filter_function(f"{file}:keep", "depth")(None) is None  # type: ignore[arg-type]
    assert callable(advantage_function(f"{file}:advantage"))
    assert callable(policy_loss_function(AlgorithmConfig(policy_loss=f"{file}:loss")))
    (here / "my_package" / "held_out.py").write_text(
        "from invrl.types import Task\n\n"
        "def hard(split, seed): yield Task(id='t', payload={}, label='x', split=split)\n"
    )
    config = RolloutConfig(
        eval=EvalConfig(sets=("a=my_package/held_out.py:hard",), tasks=1),
    )
    assert [task.id for task in load_eval_sets(config, 0)["a"]] == ["t"]


def test_file_outside_of_the_import_path_is_refused_with_a_fix(
    here: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "other_agent.py").write_text(
        "async def rollout(task, endpoint): return 1.0\n"
    )
    with pytest.raises(PluginError) as caught:
        load_rollout_function(f"{elsewhere}/other_agent.py:rollout")
    assert str(elsewhere) in caught.value.reason
    assert "PYTHONPATH" in caught.value.fix
    assert caught.value.fix.endswith("other_agent:rollout")


def test_plugins_of_every_other_kind_load(here: Path) -> None:
    assert load_reward_function("my_agent:reward").__name__ == "reward"  # type: ignore[attr-defined]
    assert callable(load_reward_function("my_package.rewards:exact"))
    assert (
        list(load_plugin("my_agent:tasks", "task_source_path", TaskSource)("train", 0))
        == []
    )
    assert load_plugin("my_agent:keep", "group_filter", GroupFilter)(None) is None  # type: ignore[arg-type]
    assert callable(advantage_function("my_agent:advantage"))
    assert callable(policy_loss_function(AlgorithmConfig(policy_loss="my_agent:loss")))


def test_built_in_names_take_precedence() -> None:
    assert advantage_function("dr_grpo") is ADVANTAGES["dr_grpo"]
    assert policy_loss_function(AlgorithmConfig()) is POLICY_LOSSES["clip"]


@pytest.mark.parametrize(
    ("path", "reason", "fix"),
    [
        ("", "not of the form module:name", "module:name"),
        ("my_agent", "not of the form module:name", "my_agent:NAME"),
        ("my_agent:", "not of the form module:name", "module:name"),
        ("my_agent.py", "not of the form module:name", "my_agent:NAME"),
        ("my_agent.rollout", "not of the form module:name", "my_agent:rollout"),
        (
            "my_package.rewards.exact",
            "not of the form module:name",
            "my_package.rewards:exact",
        ),
        ("my/agent.py:rollout", "there is no file", "as Python imports it"),
        ("my_agnet.py:rollout", "there is no file", "did you mean 'my_agent.py'"),
        ("my_agent.py:rolout", "my_agent has no 'rolout'", "did you mean 'rollout'"),
        ("my_agent.py:", "not of the form module:name", "module:name"),
        ("my-agent.py:rollout", "no name of a Python module", "rename it"),
        ("./json.py:rollout", "Python finds another json first", "rename the file"),
        ("./my_notes.txt:rollout", "no name of a Python module", "rename it"),
        ("my_agnet:rollout", "no module 'my_agnet'", "did you mean 'my_agent:rollout'"),
        (
            "my_package.reward:exact",
            "no module 'my_package.reward'",
            "mean 'my_package.rewards:exact'",
        ),
        (
            "nowhere_at_all_xyz.deep:f",
            "no module 'nowhere_at_all_xyz'",
            "as Python imports it",
        ),
        (
            "raises:f",
            "ZeroDivisionError: division by zero",
            'python -c "import raises"',
        ),
        ("raises:f", "raises.py:3", "import raises"),
        ("exits:f", "SystemExit: 3", "import exits"),
        ("needs:f", "No module named 'a_library_nobody_has'", "import needs"),
        ("syntax:f", "SyntaxError", "import syntax"),
        ("my_agent:rolout", "my_agent has no 'rolout'", "did you mean 'rollout'"),
        ("my_agent:agent.runn", "has no 'agent.runn'", "did you mean 'run'"),
        ("my_agent:number", "3 is not callable", "give a function"),
        ("my_agent:Agent", "a class", "give a function"),
        (
            "my_agent:one_argument",
            "(task) does not take",
            "one_argument(task, endpoint)",
        ),
        (
            "my_agent:three",
            "missing a required argument: 'model'",
            "three(task, endpoint)",
        ),
        (
            "my_agent:keyword_needed",
            "missing a required",
            "keyword_needed(task, endpoint)",
        ),
    ],
)
def test_plugin_mistakes_name_field_reason_and_fix(
    here: Path, path: str, reason: str, fix: str
) -> None:
    with pytest.raises(PluginError) as caught:
        load_rollout_function(path)
    error = caught.value
    assert isinstance(error, ConfigError)
    assert error.field == "rollout_function_path"
    assert error.value == path
    assert reason in error.reason
    assert fix in error.fix


@pytest.mark.parametrize("name", ["no_eps", "positional_eps"])
def test_keyword_parameters_of_a_plugin_are_checked(here: Path, name: str) -> None:
    with pytest.raises(PluginError, match=r"eps") as caught:
        advantage_function(f"my_agent:{name}")
    assert caught.value.fix == f"write it as {name}(rewards_G, *, eps)"


def test_mistyped_built_in_name_suggests_the_nearest() -> None:
    with pytest.raises(PluginError) as caught:
        advantage_function("grpoo")
    assert "did you mean 'grpo'" in caught.value.fix
    assert "dr_grpo" in caught.value.fix
