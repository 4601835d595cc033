"""Measures ratios of the loop or of the gateway, and says which fell.

    python tests/run_bench.py loop --model-path MODEL [--baseline] [--repetitions N] [--only PART]
                                   [--out FILE]
    python tests/run_bench.py gateway [--model-path MODEL] [the same flags]
    python tests/run_bench.py loop|gateway --smoke

loop: rollouts beside the engine alone, the trainer beside Hugging Face, a short run's
time and memory. gateway: tokens/s, added latency, CPU and memory of the gateway, beside
a paced stand-in engine alone. Appends to tests/bench/results/history.jsonl (--results
FOLDER for another place). Exit code 1 if a ratio fell by more than 10 % of the
history's median on this kind of machine, 2 for bad input.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from invrl.host.environment_keys import hold_keys


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    name = arguments[0] if arguments else ""
    if name == "loop":
        from bench import loop

        return loop.main(arguments[1:])
    if name == "gateway":
        from bench import gateway

        return gateway.main(arguments[1:])
    print(__doc__, file=sys.stderr)
    return 0 if name in ("-h", "--help") else 2


if __name__ == "__main__":
    hold_keys()
    sys.exit(main(sys.argv[1:]))
