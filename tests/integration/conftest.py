"""What integration tests share: the processes that trainer ranks are built in, and a
Ray for actors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local_ray import local_ray
from rank_pool import RankPool


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """For tests that start single actors."""
    with local_ray():
        yield


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    shared = RankPool(tmp_path_factory.mktemp("ranks"))
    yield shared
    shared.stop()
