"""What `--environment` of `invrl train` sets, and what it refuses."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from invrl.cli.checks.settings_checks import check_environment
from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError
from invrl.rollout.config import SEEDS_PATH
from invrl.rollout.tasks.tasks import load_tasks
from invrl.run.settings.config import Config, resolve
from invrl.run.settings.resolved_config import load_resolved, write_resolved

ENVIRONMENT = ("--environment", "gymnasium")


def from_flags(*flags: str) -> Config:
    return resolve(*parse_flags(flags))


def test_an_environment_leases_seeds_unless_tasks_are_named() -> None:
    rollout = from_flags(*ENVIRONMENT).rollout
    assert rollout.external_environments
    assert rollout.task_source_path == SEEDS_PATH
    assert from_flags(*ENVIRONMENT, "--task-file", "t").rollout.task_source_path is None
    assert from_flags("--lr", "1").rollout.environment is None


def test_seeds_of_training_differ_by_the_runs_seed_and_from_held_out_ones() -> None:
    rollout = from_flags(*ENVIRONMENT).rollout
    tasks = [
        task.payload["seed"]
        for split, seed in (("train", 0), ("train", 1), ("eval", 0))
        for task in islice(load_tasks(rollout, split, seed), 500)
    ]
    assert len(set(tasks)) == len(tasks) == 1500


def test_every_seed_is_one_that_numpy_takes() -> None:
    rollout = from_flags(*ENVIRONMENT).rollout
    for seed in (3, 17, 123_456_789):
        tasks = islice(load_tasks(rollout, "train", seed), 500)
        seeds = [task.payload["seed"] for task in tasks]
        assert len(set(seeds)) == 500
        assert min(seeds) >= 1000
        assert max(seeds) < 2**31


def test_arguments_with_commas_read_back_from_the_run_folder(tmp_path: Path) -> None:
    arguments = 'game=Taxi-v4,options={"a": 1, "b": 2}'
    config = from_flags(*ENVIRONMENT, "--environment.args", arguments)
    assert config.rollout.environment is not None
    assert config.rollout.environment.args == (
        "game=Taxi-v4",
        'options={"a": 1, "b": 2}',
    )
    file = tmp_path / "config.resolved.toml"
    write_resolved(file, config)
    assert load_resolved(file) == config


def test_an_environment_that_may_not_lease_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        from_flags(*ENVIRONMENT, "--no-external-environments")
    assert caught.value.field == "rollout.external_environments"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("gymnasium", "run: invrl environment install gymnasium"),
        ("gymnasim", "did you mean gymnasium?"),
    ],
)
def test_a_run_is_refused_before_it_starts_without_its_environment(
    name: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        check_environment(from_flags("--environment", name))
    assert fix in caught.value.fix
