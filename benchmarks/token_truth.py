"""By hand: token truth over thousands of turns. `python -m benchmarks.token_truth
scripted --turns 10000` (or `real`), from the project root. Prints the verdict as JSON
and writes it to `--out`.

`scripted`: gateway, real router, tap, scripted engine whose version counts on all the
while. `real`: the same load on a real engine, with real weight updates in between.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from tiny_model import make_tiny_model
from truth_load import Load, chatter
from truth_stack import Stack, real_stack, scripted_stack


async def scripted(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    model = make_tiny_model(folder / "model", max_positions=32768)
    async with scripted_stack(
        folder, model, chatter, token_delay_s=0.001, context_length=32768
    ) as stack:

        async def update(number: int) -> None:
            assert stack.engine is not None
            stack.engine.version = number

        return await _loaded(arguments, stack, update, every_s=1.0)


async def real(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Every few seconds all weights move, by the real transaction, under the requests
    that are running."""
    from torch_trainer import TorchSender

    from invrl.engines.config import EngineConfig
    from invrl.engines.fleet.fleet import Fleet
    from invrl.types.weights import WeightVersion
    from invrl.weights.update.canary import CanaryBound
    from invrl.weights.update.transaction import WeightTransaction

    model = make_tiny_model(folder / "model", kv_heads=4)
    fleet = Fleet(
        EngineConfig.model_validate({"dtype": "float32", "start_timeout_s": 500}),
        model,
        folder / "fleet",
    )
    await fleet.start()
    try:
        await fleet.admit()
        sender = TorchSender(model)
        bound = CanaryBound.for_dtypes("float32", "float32")
        canary = [[1, 20, 35, 70, 300, 410, 9, 2], [5, 400, 33, 33, 90, 100, 511]]
        transaction = WeightTransaction(
            sender, fleet.receivers, canary_prompts=canary, bound=bound
        )

        async def update(number: int) -> None:
            sender.train(number)
            await transaction.run(WeightVersion(number))

        async with real_stack(folder, model, fleet, max_new_tokens=24) as stack:
            return await _loaded(arguments, stack, update, every_s=4.0, at_once=8)
    finally:
        await fleet.stop()


async def _loaded(
    arguments: argparse.Namespace,
    stack: Stack,
    update: Callable[[int], Awaitable[None]],
    *,
    every_s: float,
    at_once: int = 24,
) -> dict[str, object]:
    forced = arguments.tools and stack.engine is None
    load = Load(
        stack=stack,
        turns=arguments.turns,
        seed=arguments.seed,
        at_once=at_once,
        tools=arguments.tools,
        forced=forced,
    )

    async def versions() -> None:
        for number in itertools.count(1):
            await asyncio.sleep(every_s)
            await update(number)

    counting = asyncio.create_task(versions())
    begun = time.monotonic()
    await load.run()
    seconds = time.monotonic() - begun
    if counting.done():
        counting.result()  # an update failed
    counting.cancel()
    verdict = await stack.verdict(load.sent)
    for mismatch in verdict.mismatches[:5]:
        print(*mismatch, sep="\n  ", file=sys.stderr)
    for error in load.errors[:5]:
        print("error:", error, file=sys.stderr)
    done = {
        "sessions": len(load.sessions),
        "errors": len(load.errors),
        "did": dict(sorted(load.did.items())),
    }
    return {
        "engine": arguments.engine,
        **verdict.shown(),
        **done,
        "load_seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["scripted", "real"])
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tools", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    # the router's question whether it is gRPC
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        run = scripted if arguments.engine == "scripted" else real
        result = asyncio.run(run(arguments, Path(folder)))
    shown = json.dumps(result, indent=2) + "\n"
    print(shown)
    if arguments.out:
        arguments.out.write_text(shown)
    sys.exit(bool(result["mismatches"] or result["errors"]))


if __name__ == "__main__":
    main()
