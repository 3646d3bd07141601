"""`python -m sglang_adapt.simulate`: see `cli.py`."""

from __future__ import annotations

import sys

from sglang_adapt.simulate.cli import main

sys.exit(main())
