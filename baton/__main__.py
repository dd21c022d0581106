"""`python -m baton`: the `baton` command without an installed script."""

from __future__ import annotations

import sys

from baton.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
