"""What unit tests share: a tiny model, its renderer, gateways on a fake engine (one
alone, one of two workers, and one that ends and starts again), and the process that
forks loaders of weights. Modules that a test wrote end with it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from dying_fleet import Deaths, mortal_fleet
from fakes import FakeEngine, random_reply
from gateway_restarts import Life
from gateway_workers import Workers
from running_gateway import Running, running
from tiny_model import make_tiny_model

from benchmarks.weight_updates.loader_server import LOADER_MODULE
from invrl.engines.fleet.fleet import Fleet
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.renderer import Renderer
from invrl.host.processes.fork_parent import ForkParent


@pytest.fixture(autouse=True)
def user_modules_are_forgotten(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """A module that a test wrote and imported is not what the next test of the same
    process finds under its name."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    written = tmp_path_factory.getbasetemp()
    for name in sys.modules.keys() - modules:
        file = getattr(sys.modules[name], "__file__", None)
        if isinstance(file, str) and Path(file).is_relative_to(written):
            del sys.modules[name]


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


@pytest.fixture
async def workers(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Workers]:
    async with (
        FakeEngine(random_reply()) as engine,
        httpx.AsyncClient(timeout=120) as http,
    ):
        two_workers = Workers(engine, http, tmp_path)
        try:
            for number in range(2):
                await two_workers.start(
                    number,
                    model,
                    renderer,
                    max_body_bytes=20_000,
                    session={"max_open": 6},
                )
            yield two_workers
        finally:
            await two_workers.stop()


@pytest.fixture
def life(tmp_path: Path, model: Path, renderer: Renderer) -> Life:
    return Life(tmp_path, model, renderer, sampling_seed=7)


@pytest.fixture(scope="session")
def loader_parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkParent]:
    """Imports torch once for all loaders of the session."""
    log = tmp_path_factory.mktemp("loaders") / "loader-parent.log"
    parent = ForkParent(LOADER_MODULE, log=log)
    yield parent
    parent.stop()


@pytest.fixture
def deaths() -> Deaths:
    return Deaths()


@pytest.fixture
async def fleet(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path, deaths: Deaths
) -> AsyncIterator[Fleet]:
    async with mortal_fleet(monkeypatch, tiny_model, tmp_path, deaths) as running_fleet:
        yield running_fleet
