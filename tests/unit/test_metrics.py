"""Reductions: merging parts gives what all of it at once would have given."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invrl.types.metrics import Max, Mean, Metric, Sum, merge, resolve

numbers = st.lists(
    st.integers(-1000, 1000),
    min_size=1,
    max_size=20,
)


def metrics_of(values: list[int]) -> dict[str, Metric]:
    return {
        "mean": Mean(sum(values), len(values)),
        "sum": Sum(sum(values)),
        "max": Max(max(values)),
    }


@given(parts=st.lists(numbers, min_size=1, max_size=5))
def test_merged_metrics_equal_those_of_the_whole(
    parts: list[list[int]],
) -> None:
    merged = merge(metrics_of(values) for values in parts)
    whole = list(itertools.chain(*parts))
    assert resolve(merged) == pytest.approx(
        {
            "mean": sum(whole) / len(whole),
            "sum": sum(whole),
            "max": max(whole),
        }
    )


def test_metric_missing_from_a_part_is_kept() -> None:
    merged = merge(
        [
            {"often": Sum(1)},
            {"once": Sum(2)},
            {"often": Sum(3)},
        ]
    )
    assert merged == {"often": Sum(4), "once": Sum(2)}


def test_mean_of_nothing_is_0() -> None:
    nothing = Mean(0.0, 0.0)
    assert nothing.value() == 0.0
    assert (nothing + Mean(3.0, 2.0)).value() == 1.5
    assert merge([]) == {}


def test_metrics_of_different_kinds_do_not_merge() -> None:
    with pytest.raises(TypeError, match="metric a: Sum and Mean"):
        merge([{"a": Sum(1)}, {"a": Mean(1)}])


def test_prefix_is_added_to_every_metric_name() -> None:
    metrics = {"reward": Mean(1.0, 2.0)}
    assert resolve(metrics, "rollout/") == {"rollout/reward": 0.5}
