"""What an objective says of itself is believed only if it can be used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import LossInputs, LossOutputs
from invrl.algorithms.objectives.example import try_objective
from invrl.algorithms.objectives.objectives import (
    Needs,
    is_built_in,
    load_objective,
    objective_needs,
)
from invrl.algorithms.objectives.sample_table import SampleTable
from invrl.algorithms.tables import CriticConfig, KlConfig
from invrl.errors import PluginError


def plain(inputs: object) -> None: ...


def with_needs(inputs: object) -> None: ...


with_needs.needs = Needs(old=True, reference=True)


def with_wrong_needs(inputs: object) -> None: ...


with_wrong_needs.needs = {"reference"}


def with_table_alone(inputs: object) -> None: ...


with_table_alone.needs = Needs(sample_table=True)


def with_two_arguments(inputs: object, other: object) -> None: ...


def of_this_file(name: str) -> AlgorithmConfig:
    return AlgorithmConfig(objective=f"{__name__}:{name}")


def test_policy_gradient_needs_follow_from_its_settings() -> None:
    assert is_built_in("rl")
    assert objective_needs(AlgorithmConfig()) == Needs(old=True)
    assert objective_needs(AlgorithmConfig(old_logprobs="engine")) == Needs()
    assert objective_needs(AlgorithmConfig(kl={"coefficient": 0.1})) == Needs(
        old=True, reference=True
    )


def test_user_objective_needs_what_it_declares() -> None:
    assert objective_needs(of_this_file("plain")) == Needs()
    assert objective_needs(of_this_file("with_needs")) == Needs(
        old=True, reference=True
    )
    assert load_objective(of_this_file("plain")) is plain


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("with_wrong_needs", r"its attribute `needs` is \{'reference'\}.*Needs\(old="),
        ("with_table_alone", "no method `couple`.*add couple"),
        ("with_two_arguments", "does not take the call"),
        ("missing", "has no 'missing'"),
    ],
)
def test_unusable_objective_is_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(PluginError, match=f"(?s)objective.*{name}.*{reason}"):
        objective_needs(of_this_file(name))


def square(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=inputs.current_N.square().sum(), metrics={})


def of_entropies(inputs: LossInputs) -> LossOutputs:
    assert inputs.entropy_N is not None
    return LossOutputs(loss=-inputs.entropy_N.sum(), metrics={})


def of_a_column_of_the_run(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(
        loss=(inputs.columns["process_reward"] * inputs.current_N).sum(), metrics={}
    )


def not_a_number(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=(inputs.current_N - 10).log().sum(), metrics={})


def infinite_slope(inputs: LossInputs) -> LossOutputs:
    zeros_N = inputs.current_N - inputs.current_N.detach()
    return LossOutputs(loss=zeros_N.sqrt().sum(), metrics={})


def per_token(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=inputs.current_N, metrics={})


def constant(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=torch.tensor(1.0), metrics={})


def of_the_old_policy(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(
        loss=inputs.advantages_N.clone().requires_grad_().sum(), metrics={}
    )


def raising(inputs: LossInputs) -> LossOutputs:
    raise RuntimeError("shapes differ")


@pytest.mark.parametrize("name", ["square", "of_entropies", "of_a_column_of_the_run"])
def test_objective_is_tried_before_the_start(name: str) -> None:
    try_objective(of_this_file(name))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("not_a_number", "random tokens its loss is nan"),
        ("infinite_slope", "it has a gradient of"),
        ("per_token", r"its loss is a tensor of shape \[9\], not a scalar"),
        ("constant", "it has no gradient"),
        ("of_the_old_policy", "does not depend on the model"),
        ("raising", "it raised RuntimeError: shapes differ"),
    ],
)
def test_objective_that_fails_its_trial_is_refused(name: str, reason: str) -> None:
    with pytest.raises(PluginError, match=f"(?s)objective.*{name}.*{reason}"):
        try_objective(of_this_file(name))


def table(group_ids: str, *, reference: bool = True) -> SampleTable:
    values_M = np.array([float(ord(group_id)) for group_id in group_ids])
    return SampleTable(
        group_ids=tuple(group_ids),
        tokens_M=values_M,
        current_M=-values_M,
        reference_M=values_M if reference else None,
        numbers={"chosen": values_M} if group_ids else {},
    )


def test_objective_tables_of_ranks_are_joined_in_order() -> None:
    joined = SampleTable.joined(
        [table(""), table("ab"), table("", reference=False), table("c")]
    )
    assert joined.group_ids == ("a", "b", "c")
    assert joined.tokens_M.tolist() == [97, 98, 99]
    assert joined.current_M.tolist() == [-97, -98, -99]
    assert joined.reference_M is not None
    assert (
        joined.reference_M.tolist() == joined.numbers["chosen"].tolist() == [97, 98, 99]
    )
    assert SampleTable.joined([table("")]).group_ids == ()


def with_values(inputs: object) -> None: ...


with_values.needs = Needs(values=True)


def test_critic_is_needed_by_its_advantages() -> None:
    assert objective_needs(AlgorithmConfig(advantage="gae")).values
    assert not objective_needs(AlgorithmConfig(advantage="grpo")).values
    assert not objective_needs(AlgorithmConfig(advantage="gae")).reference
    with_kl = AlgorithmConfig(
        advantage="gae",
        kl={"coefficient": 0.1, "added_to": "reward", "estimator": "k1"},
    )
    assert objective_needs(with_kl).reference


def test_user_objective_declares_the_critic_values_of_its_advantages() -> None:
    config = of_this_file("with_values")
    assert objective_needs(config).values
    with_gae = config.model_copy(update={"advantage": "gae"})
    assert objective_needs(with_gae).values
    assert not objective_needs(with_gae).reference
    in_rewards = with_gae.model_copy(
        update={"kl": KlConfig(coefficient=0.1, added_to="reward")}
    )
    assert objective_needs(in_rewards).reference
    with pytest.raises(
        PluginError, match=r"(?s)--advantage gae needs a critic.*Needs\(values=True"
    ):
        objective_needs(
            of_this_file("with_needs").model_copy(update={"advantage": "gae"})
        )


def test_critic_lambda_defaults_to_the_policys() -> None:
    assert CriticConfig(gae_lambda=0.7).returns_lambda == 0.7
    assert CriticConfig(gae_lambda=0.7, returns_lambda=1.0).returns_lambda == 1.0
    vapo = AlgorithmConfig(algorithm_preset="vapo").critic
    assert vapo is not None
    assert vapo.returns_lambda == 1.0
    assert vapo.length_alpha == 0.05
