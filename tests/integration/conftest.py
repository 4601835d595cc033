"""What integration tests share: the processes that trainer ranks are built in, and a
Ray for actors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from local_ray import local_ray
from rank_pool import RankPool

from invrl.host.ray.ray_setup import worker_environment


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """For tests that start single actors: they have what `ray_setup.prepare_ray` gives
    to those of a run."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as environment:
            uvloop = "RAY_USE_UVLOOP"
            environment.setenv(uvloop, worker_environment()[uvloop])
            environment.setenv("RAY_process_group_cleanup_enabled", "true")
            # Ray's own 15 starves them while another worker of the suite computes.
            environment.setenv("RAY_worker_niceness", "0")
            stack.enter_context(local_ray())
        yield


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    shared = RankPool(tmp_path_factory.mktemp("ranks"))
    yield shared
    shared.stop()
