"""The versions of sampled tokens, from the labels of an engine's events and from what
its last one tells."""

from __future__ import annotations

import random

import pytest

from invrl.engines.client.version_spans import EngineSpan, VersionTracker
from invrl.errors import ServerError


def listed(versions: VersionTracker) -> list[int]:
    """One per token."""
    return [
        int(span.version)
        for span in versions.spans
        for _ in range(span.start, span.end)
    ]


def test_tokens_under_a_new_label_may_be_sampled_by_the_previous_weights():
    versions = VersionTracker()
    for label, sampled in (("3", 2), ("3", 1), ("4", 5), ("4", 2), ("6", 1), ("6", 1)):
        versions.add(label, sampled, None)
    assert listed(versions) == [3, 3, 3, *[3] * 5, 4, 4, 4, 6]
    assert not versions.certain


def test_single_label_is_the_version_of_all_tokens():
    versions = VersionTracker()
    for sampled in (1, 0, 7):
        versions.add("3", sampled, None)
    assert listed(versions) == [3] * 8
    assert len(versions.spans) == 1
    assert versions.certain


def test_spans_of_the_last_event_replace_those_from_labels():
    versions = VersionTracker()
    versions.add("3", 2, None)
    versions.add("4", 3, None)
    spans = [
        EngineSpan("3", 0, 4),
        EngineSpan("3", 4, 4),
        EngineSpan("4", 4, 9),
    ]
    versions.add("4", 2, spans)
    assert listed(versions) == [3, 3, 3, 3, 4, 4, 4]
    assert versions.certain


@pytest.mark.parametrize("seed", range(50))
def test_recorded_version_is_never_newer_than_the_weights(seed: int):
    """Tokens are sampled one by one while the weights change now and then; they are
    sent on in events of any size, and what was on its way at a change goes as one. The
    first event goes before any change: it has no label but its own."""
    source = random.Random(seed)
    version = 1
    truth = [1]
    sent = 1
    versions = VersionTracker()
    versions.add("1", 1, None)
    for _ in range(200):
        truth.append(version)
        if source.random() < 0.05:
            # what is not sent yet will have the new label
            version += source.randint(1, 2)
        if source.random() < 0.5:
            versions.add(str(version), len(truth) - sent, None)
            sent = len(truth)
            recorded = listed(versions)
            assert len(recorded) == sent
            assert all(
                recorded_version <= true
                for recorded_version, true in zip(recorded, truth, strict=False)
            )


@pytest.mark.parametrize(
    "told",
    [
        [EngineSpan("3", 0, 2)],
        [EngineSpan("3", 0, 1), EngineSpan("4", 2, 3)],
        [EngineSpan("3", 1, 3)],
        [EngineSpan("default", 0, 3)],
    ],
)
def test_wrong_version_spans_of_the_last_event_are_a_server_error(
    told: list[EngineSpan],
):
    with pytest.raises(ServerError, match="version"):
        VersionTracker().add("3", 3, told)


def test_version_label_that_is_not_a_number_is_a_server_error():
    with pytest.raises(ServerError, match="'default'"):
        VersionTracker().add("default", 3, None)
