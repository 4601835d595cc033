"""`python -m invrl.cli` is `invrl`."""

import sys

from invrl.cli.main import main

sys.exit(main())
