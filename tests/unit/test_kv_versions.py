"""Whose cached keys and values a request may find."""

import pytest

from invrl.engines.inside_sglang.kv_cache_versions import key_of_changes


@pytest.mark.parametrize("own", [None, "", "an adapter"])
def test_cache_key_appends_the_weight_changes_to_the_requests_own_key(
    own: str | None,
) -> None:
    first = key_of_changes(own, 0)
    second = key_of_changes(first, 1)
    assert first != second
    assert second == key_of_changes(own, 1)
    assert second.startswith(own or "")


def test_adapters_have_different_cache_keys() -> None:
    assert key_of_changes("one", 3) != key_of_changes("other", 3)
