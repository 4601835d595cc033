"""What a wrong name of a setting is answered with."""

from __future__ import annotations

import pytest

from invrl.run.config import SECTIONS
from invrl.run.name_suggestions import _FOREIGN_NAMES, RENAMED, meant_setting, near_settings, nearest_setting

OURS = [name for section in SECTIONS.values() for name in section.model_fields]


def test_table_of_foreign_names_leads_only_to_existing_settings():
    assert set(_FOREIGN_NAMES) <= set(OURS)
    foreign = [name for names in _FOREIGN_NAMES.values() for name in names.split()]
    assert len(foreign) == len(set(foreign)), "a name has one meaning"
    assert not set(foreign) & set(OURS)


@pytest.mark.parametrize("ours", sorted(_FOREIGN_NAMES))
def test_every_foreign_setting_name_suggests_ours(ours: str):
    for foreign in _FOREIGN_NAMES[ours].split():
        assert meant_setting(foreign) == ours
        assert near_settings(
            "--" + foreign.replace("_", "-"), [f"--{name.replace('_', '-')}" for name in OURS]
        ) == [f"--{ours.replace('_', '-')}"]


def test_setting_that_the_command_lacks_is_not_suggested():
    assert near_settings("--learning-rate", ["--seed", "--gateway-port"]) == []


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("--tempratur", "--temperature"),
        ("--Learning-Rate", "--lr"),
        ("--gradient-cliping", "--clip-grad"),
        ("--rollout-batch-sise", "--rollout-batch-size"),
        ("--timeout-of-the-session", "--session-idle-timeout-s"),
    ],
)
def test_wrong_setting_name_suggests_by_spelling_and_by_words(wrong: str, near: str):
    assert near in near_settings(wrong, [f"--{name.replace('_', '-')}" for name in OURS])


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_renamed_setting_is_refused_with_its_new_name(old: str, new: str) -> None:
    names = [key for section in SECTIONS.values() for key in section.model_fields]
    assert old not in names
    assert nearest_setting(old, names) == f"it was renamed: write {new}"
    flags = ["--" + name.replace("_", "-") for name in names]
    assert nearest_setting("--" + old.replace("_", "-"), flags).endswith("--" + new.replace("_", "-"))
