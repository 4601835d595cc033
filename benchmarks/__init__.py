"""Measurements of this repository: ratios of two measurements of one run, and their
history in `results/`. None of it is installed with the product.

Each program is `python -m benchmarks.NAME`, from the root of a checkout. `training/`
measures the trainer, `weight_updates/` the updates of an engine's weights, and
`gateway_load/` is the load of the gateway and the stand-ins around it. The programs of
`tests/` that they use (a tiny model, a scripted engine) are imported by their names:
this package puts that folder on the path.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TESTS = str(ROOT / "tests")
if _TESTS not in sys.path:
    sys.path.append(_TESTS)
