"""`python -m benchmarks.weight_updates.loader_program PORT LAYOUT_FILE DEVICE`: an
engine's weight loader without SGLang.

An HTTP server that answers the control requests of `engines/client/sglang_client.py`.
It runs the weight loader (`weights/loader/weight_loader.py`) on a torch module that has
an engine's fused parameters, and computes nothing else. Requests need the key in
`KEY_VARIABLE`, because a request for an update is unpickled, as SGLang does it."""

import base64
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from aiohttp import web

from invrl.engines.inside_sglang.engine_routes import NAME_PATH
from invrl.families.registry import FAMILIES
from invrl.interfaces import WeightLayout
from invrl.weights.loader.weight_loader import run

KEY_VARIABLE = "INVRL_LOADER_KEY"
_LARGEST_REQUEST = 1 << 30
"""Bytes."""


def engine_shapes(layout: WeightLayout) -> dict[str, tuple[int, ...]]:
    """The parameters of an engine that serves these tensors. Those of experts are not
    stacked."""
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in layout:
        name = _parameter_name(spec.name)
        rows_before = shapes[name][0] if name in shapes else 0
        shapes[name] = (rows_before + spec.shape[0], *spec.shape[1:])
    return shapes


def _parameter_name(tensor_name: str) -> str:
    """The name of the engine's parameter that holds this tensor of a checkpoint."""
    for family in FAMILIES.values():
        for fused, parts in family.engine_fusions.items():
            for part in parts:
                if f".{part}." in tensor_name:
                    return tensor_name.replace(f".{part}.", f".{fused}.")
    return tensor_name


def make_module(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: str = "cpu"
) -> torch.nn.Module:
    """A module with these parameters, all zero."""
    root = torch.nn.Module()
    for name, shape in shapes.items():
        *path, last_name = name.split(".")
        owner = root
        for child in path:
            if child not in dict(owner.named_children()):
                owner.add_module(child, torch.nn.Module())
            owner = owner.get_submodule(child)
        zeros = torch.zeros(shape, dtype=dtype, device=device)
        parameter = torch.nn.Parameter(zeros, requires_grad=False)
        owner.register_parameter(last_name, parameter)
    return root


class _Control:
    """The handlers of requests. They block the event loop, as an update blocks SGLang's
    scheduler."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._version = ""

    async def update_weights(self, request: web.Request) -> web.Response:
        body = await request.json()
        named_tensors = pickle.loads(
            base64.b64decode(body["serialized_named_tensors"][0])
        )
        run(self._model, named_tensors)
        return web.json_response({})

    async def name_weights(self, request: web.Request) -> web.Response:
        self._version = request.query["version"]
        return await self.model_info(request)

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._version})

    async def accept(self, _: web.Request) -> web.Response:
        """Pause, resume and the like: nothing generates here."""
        return web.json_response({})


def make_application(model: torch.nn.Module, key: str) -> web.Application:
    @web.middleware
    async def check_key(request: web.Request, handler) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {key}":
            return web.Response(status=401)
        return await handler(request)

    control = _Control(model)
    application = web.Application(
        middlewares=[check_key], client_max_size=_LARGEST_REQUEST
    )
    application.add_routes(
        [
            web.post("/update_weights_from_tensor", control.update_weights),
            web.post(NAME_PATH, control.name_weights),
            web.get("/model_info", control.model_info),
            web.post("/{path:.*}", control.accept),
        ]
    )
    return application


def prepare() -> None:
    """For a process that forks loaders: this module has imported all that they need."""


def main(arguments: Sequence[str]) -> None:
    port, layout_file, device = arguments
    torch.set_num_threads(1)
    layout = msgspec.json.decode(Path(layout_file).read_bytes(), type=WeightLayout)
    dtype: torch.dtype = getattr(torch, layout[0].dtype)
    module = make_module(engine_shapes(layout), dtype, device)
    application = make_application(module, os.environ[KEY_VARIABLE])
    web.run_app(application, host="127.0.0.1", port=int(port), print=None)


if __name__ == "__main__":
    main(sys.argv[1:])
