"""Whose cached keys and values a request may find."""

import pytest

from invrl.engines.inside_sglang.kv_cache_versions import key_with_changes


@pytest.mark.parametrize("own", [None, "", "an adapter"])
def test_cache_key_appends_the_weight_changes_to_the_requests_own_key(
    own: str | None,
) -> None:
    first = key_with_changes(own, 0)
    second = key_with_changes(first, 1)
    assert first != second
    assert second == key_with_changes(own, 1)
    assert second.startswith(own or "")


def test_adapters_have_different_cache_keys() -> None:
    assert key_with_changes("one", 3) != key_with_changes("other", 3)
