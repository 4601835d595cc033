"""What an objective says of itself is believed only if it can be used."""

from __future__ import annotations

import numpy as np
import pytest

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.objectives import Needs, is_built_in, needs_of, objective_of
from invrl.algorithms.row_table import RowTable
from invrl.errors import PluginError


def plain(inputs: object) -> None: ...


def with_needs(inputs: object) -> None: ...


with_needs.needs = Needs(old=True, reference=True)


def with_wrong_needs(inputs: object) -> None: ...


with_wrong_needs.needs = {"reference"}


def with_table_alone(inputs: object) -> None: ...


with_table_alone.needs = Needs(row_table=True)


def with_two_arguments(inputs: object, other: object) -> None: ...


def of_this_file(name: str) -> AlgorithmConfig:
    return AlgorithmConfig(objective=f"{__name__}:{name}")


def test_the_policy_gradient_needs_what_its_settings_read() -> None:
    assert is_built_in("rl")
    assert needs_of(AlgorithmConfig()) == Needs(old=True)
    assert needs_of(AlgorithmConfig(old_logprobs="engine")) == Needs()
    assert needs_of(AlgorithmConfig(kl_coef=0.1)) == Needs(old=True, reference=True)


def test_an_objective_of_the_users_needs_what_it_says() -> None:
    assert needs_of(of_this_file("plain")) == Needs()
    assert needs_of(of_this_file("with_needs")) == Needs(old=True, reference=True)
    assert objective_of(of_this_file("plain")) is plain


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("with_wrong_needs", r"its attribute `needs` is \{'reference'\}.*Needs\(old="),
        ("with_table_alone", "no method `couple`.*add couple"),
        ("with_two_arguments", "does not take the call"),
        ("missing", "has no 'missing'"),
    ],
)
def test_an_objective_that_cannot_be_used_is_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(PluginError, match=f"(?s)objective.*{name}.*{reason}"):
        needs_of(of_this_file(name))


def table(group_ids: str, *, reference: bool = True) -> RowTable:
    values_M = np.array([float(ord(group_id)) for group_id in group_ids])
    return RowTable(
        group_ids=tuple(group_ids),
        tokens_M=values_M,
        current_M=-values_M,
        reference_M=values_M if reference else None,
        numbers={"chosen": values_M} if group_ids else {},
    )


def test_tables_of_ranks_are_joined_in_order_and_a_rank_may_have_no_row() -> None:
    joined = RowTable.joined([table(""), table("ab"), table("", reference=False), table("c")])
    assert joined.group_ids == ("a", "b", "c")
    assert joined.tokens_M.tolist() == [97, 98, 99]
    assert joined.current_M.tolist() == [-97, -98, -99]
    assert joined.reference_M is not None
    assert joined.reference_M.tolist() == joined.numbers["chosen"].tolist() == [97, 98, 99]
    assert RowTable.joined([table("")]).group_ids == ()
