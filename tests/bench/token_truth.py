"""By hand: token truth over thousands of turns. `python tests/bench/token_truth.py scripted --turns 10000`
(or `real`), from the project root. Prints the verdict as JSON and writes it to `--out`.

`scripted`: gateway, real router, tap, scripted engine whose version counts on all the while. `real`: the same
load on a real engine, with real weight updates in between.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_model import make_tiny_model
from truth_load import Load, chatter
from truth_stack import Stack, scripted_stack


async def scripted(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    model = make_tiny_model(folder / "model", max_positions=32768)
    async with scripted_stack(folder, model, chatter, token_delay_s=0.001, context_length=32768) as stack:
        return await _loaded(arguments, stack)


async def _loaded(arguments: argparse.Namespace, stack: Stack) -> dict[str, object]:
    load = Load(stack=stack, turns=arguments.turns, seed=arguments.seed, tools=arguments.tools)

    async def versions() -> None:
        while stack.engine is not None:
            await asyncio.sleep(1.0)
            stack.engine.version += 1

    counting = asyncio.create_task(versions())
    begun = time.monotonic()
    await load.run()
    seconds = time.monotonic() - begun
    counting.cancel()
    verdict = await stack.verdict(load.sent)
    for mismatch in verdict.mismatches[:5]:
        print(*mismatch, sep="\n  ", file=sys.stderr)
    for error in load.errors[:5]:
        print("error:", error, file=sys.stderr)
    done = {"sessions": len(load.sessions), "errors": len(load.errors), "did": dict(sorted(load.did.items()))}
    return {"engine": arguments.engine, **verdict.shown(), **done, "load_seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["scripted", "real"])
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tools", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # the router's question whether it is gRPC
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(scripted(arguments, Path(folder)))
    shown = json.dumps(result, indent=2) + "\n"
    print(shown)
    if arguments.out:
        arguments.out.write_text(shown)
    sys.exit(bool(result["mismatches"] or result["errors"]))


if __name__ == "__main__":
    main()
