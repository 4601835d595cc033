"""The versions of sampled tokens, from what an engine's events tell."""

from __future__ import annotations

import pytest

from invrl.engines.client.version_spans import EngineSpan, version_spans
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
