"""What unit tests share: a tiny model, its renderer, and a gateway on a fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from running_gateway import Running, running
from tiny_model import make_tiny_model

from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.renderer import Renderer


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
