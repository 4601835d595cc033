"""What integration tests share: the processes that trainer ranks are built in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    shared = RankPool(tmp_path_factory.mktemp("ranks"))
    yield shared
    shared.stop()
