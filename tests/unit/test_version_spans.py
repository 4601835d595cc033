"""The versions of sampled tokens, from what an engine's events tell."""

from __future__ import annotations

import pytest

from invrl.engines.client.version_spans import (
    EngineSpan,
    joined_spans,
    version_spans,
)
from invrl.errors import ServerError
from invrl.types.turns import VersionSpan
from invrl.types.weights import WeightVersion


def span(version: int, start: int, end: int) -> VersionSpan:
    return VersionSpan(version=WeightVersion(version), start=start, end=end)


def test_spans_are_the_engines_without_empty_ones_and_later_tokens():
    told = [EngineSpan("3", 0, 4), EngineSpan("3", 4, 4), EngineSpan("4", 4, 9)]
    assert version_spans(told, 7) == (span(3, 0, 4), span(4, 4, 7))
    assert version_spans(told, 3) == (span(3, 0, 3),)


@pytest.mark.parametrize(
    "told",
    [
        [],
        [EngineSpan("3", 0, 2)],
        [EngineSpan("3", 0, 1), EngineSpan("4", 2, 3)],
        [EngineSpan("3", 1, 3)],
        [EngineSpan("default", 0, 3)],
    ],
)
def test_wrong_version_spans_are_a_server_error(told: list[EngineSpan]):
    with pytest.raises(ServerError, match="version"):
        version_spans(told, 3)


def test_spans_of_the_tokens_that_follow_are_moved_behind_the_earlier_ones():
    earlier = (span(3, 0, 4), span(4, 4, 6))
    assert joined_spans(earlier, (span(5, 0, 2),)) == (*earlier, span(5, 6, 8))


def test_two_spans_of_one_version_become_one_where_they_meet():
    joined = joined_spans((span(3, 0, 4),), (span(3, 0, 2), span(4, 2, 3)))
    assert joined == (span(3, 0, 6), span(4, 6, 7))
    assert joined_spans((), (span(3, 0, 2),)) == (span(3, 0, 2),)
    assert joined_spans((span(3, 0, 2),), ()) == (span(3, 0, 2),)
