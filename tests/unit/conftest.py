"""What unit tests share: a tiny model, its renderer, a gateway on a fake engine, and
the process that forks loaders of weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from running_gateway import Running, running
from tiny_model import make_tiny_model

from invrl.bench.loader_server import LOADER_MODULE
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.renderer import Renderer
from invrl.host.fork_parent import ForkParent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def renderer(model: Path) -> Renderer:
    return load_renderer(str(model), 512)


@pytest.fixture
async def gateway(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Running]:
    async with running(tmp_path, model, renderer) as gateway_on_fake_engine:
        yield gateway_on_fake_engine


@pytest.fixture(scope="session")
def loader_parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkParent]:
    """Imports torch once for all loaders of the session."""
    log = tmp_path_factory.mktemp("loaders") / "loader-parent.log"
    parent = ForkParent(LOADER_MODULE, log=log)
    yield parent
    parent.stop()
