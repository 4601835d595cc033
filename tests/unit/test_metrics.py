"""Reductions: merging parts gives what all of it at once would have given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invrl.types.metrics import Max, Mean, Metric, Sum, merge, resolve

numbers = st.lists(st.integers(-1000, 1000), min_size=1, max_size=20)


@given(parts=st.lists(numbers, min_size=1, max_size=5))
def test_merged_metrics_equal_those_of_the_whole(parts: list[list[int]]) -> None:
    def metrics(values: list[int]) -> dict[str, Metric]:
        return {
            "m": Mean(sum(values), len(values)),
            "s": Sum(sum(values)),
            "x": Max(max(values)),
        }

    whole = [value for part in parts for value in part]
    assert resolve(merge(metrics(part) for part in parts)) == pytest.approx(
        {"m": sum(whole) / len(whole), "s": sum(whole), "x": max(whole)}
    )


def test_metric_missing_from_a_part_is_kept() -> None:
    assert merge([{"a": Sum(1)}, {"b": Sum(2)}, {"a": Sum(3)}]) == {
        "a": Sum(4),
        "b": Sum(2),
    }


def test_mean_of_nothing_is_0() -> None:
    assert Mean(0.0, 0.0).value() == 0.0
    assert (Mean(0.0, 0.0) + Mean(3.0, 2.0)).value() == 1.5
    assert merge([]) == {}


def test_metrics_of_different_kinds_do_not_merge() -> None:
    with pytest.raises(TypeError, match="metric a: Sum and Mean"):
        merge([{"a": Sum(1)}, {"a": Mean(1)}])


def test_prefix_is_added_to_every_metric_name() -> None:
    assert resolve({"reward": Mean(1.0, 2.0)}, "rollout/") == {"rollout/reward": 0.5}
