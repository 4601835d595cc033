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


def with_values(inputs: object) -> None: ...


with_values.needs = Needs(values=True)


def test_the_critic_follows_from_the_advantage() -> None:
    assert needs_of(AlgorithmConfig(advantage="gae")).values
    assert not needs_of(AlgorithmConfig(advantage="grpo")).values
    assert not needs_of(AlgorithmConfig(advantage="gae")).reference
    with_kl = AlgorithmConfig(advantage="gae", kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    assert needs_of(with_kl).reference


def test_an_objective_of_the_users_names_the_values_that_its_advantages_need() -> None:
    config = of_this_file("with_values")
    assert needs_of(config).values
    with_gae = config.model_copy(update={"advantage": "gae"})
    assert needs_of(with_gae).values
    assert not needs_of(with_gae).reference
    in_rewards = with_gae.model_copy(update={"kl_coef": 0.1, "kl_in": "reward"})
    assert needs_of(in_rewards).reference
    with pytest.raises(PluginError, match=r"(?s)--advantage gae needs a critic.*Needs\(values=True"):
        needs_of(of_this_file("with_needs").model_copy(update={"advantage": "gae"}))


def test_the_critics_lambda_follows_the_policys() -> None:
    assert AlgorithmConfig(gae_lambda=0.7).critic_gae_lambda == 0.7
    assert AlgorithmConfig(gae_lambda=0.7, critic_gae_lambda=1.0).critic_gae_lambda == 1.0
    vapo = AlgorithmConfig(algorithm_preset="vapo")
    assert (vapo.critic_gae_lambda, vapo.gae_length_alpha) == (1.0, 0.05)
