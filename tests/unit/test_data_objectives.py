"""Built-in objectives and the rows of files: each one gets the numbers that it
reads."""

from __future__ import annotations

from invrl.algorithms.objectives import preferences
from invrl.algorithms.objectives.objectives import ON_FILES, ON_PAIRS
from invrl.datasets import samples
from invrl.datasets.config import KIND_OF_OBJECTIVE


def test_every_objective_on_files_has_a_kind_of_row() -> None:
    assert set(KIND_OF_OBJECTIVE) == set(ON_FILES)
    assert {name for name, kind in KIND_OF_OBJECTIVE.items() if kind == "pairs"} == set(
        ON_PAIRS
    )


def test_numbers_have_the_names_that_objectives_read() -> None:
    assert samples.CHOSEN == preferences.CHOSEN
    assert samples.DESIRABLE == preferences.DESIRABLE
