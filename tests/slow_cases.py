"""Cases of a parametrized test, most of which have the mark `slow`: only
`launch/test.sh --all` runs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest


def first_quick(cases: Iterable[object]) -> list[pytest.ParameterSet]:
    """The cases, all but the first of them slow. A tuple holds a value for each
    argument."""
    first, *others = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [
        pytest.param(*first),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in others),
    ]


def named_quick(
    cases: Mapping[str, object] | Iterable[str], *names: str
) -> list[pytest.ParameterSet]:
    """The values of the cases with their keys as ids, or the names themselves; slow but
    for `names`."""
    values = cases if isinstance(cases, Mapping) else {name: name for name in cases}
    unknown = set(names) - set(values)
    assert not unknown, f"no case has the names {unknown}"
    return [
        pytest.param(value, id=name, marks=() if name in names else pytest.mark.slow)
        for name, value in values.items()
    ]
