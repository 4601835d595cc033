"""Experts chosen within groups, against the choice written out token by token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invrl.train.runtime.megatron_repairs import best_of_best_groups


@given(
    tokens=st.integers(1, 5),
    groups=st.integers(1, 5),
    size=st.integers(2, 5),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@settings(deadline=None)
def test_expert_group_is_scored_by_its_two_best_experts(
    tokens: int, groups: int, size: int, seed: int, data: st.DataObject
) -> None:
    chosen_groups = data.draw(st.integers(1, groups))
    chosen = data.draw(st.integers(1, chosen_groups * size))
    scores = torch.randn(
        tokens, groups * size, generator=torch.Generator().manual_seed(seed)
    )
    values, experts = best_of_best_groups(
        scores, chosen, tokens, groups * size, groups, chosen_groups
    )
    for token, row in enumerate(scores.tolist()):
        by_group = [row[group * size : (group + 1) * size] for group in range(groups)]
        ranked = sorted(
            range(groups), key=lambda group: -sum(sorted(by_group[group])[-2:])
        )
        allowed = [
            expert
            for expert in range(len(row))
            if expert // size in ranked[:chosen_groups]
        ]
        best = sorted(allowed, key=lambda expert: -row[expert])[:chosen]
        assert experts[token].tolist() == best
        assert values[token].tolist() == [row[expert] for expert in best]
