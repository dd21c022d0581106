"""A real router, `python -m baton.router`, that stamps its tokens: `router_process.py STAMPS MODEL FLAG...`."""

from __future__ import annotations

import sys
from pathlib import Path

from baton.router.__main__ import main
from tests.stations.router_stamps import stamped

if __name__ == "__main__":
    with stamped(Path(sys.argv[1])):
        sys.exit(main(sys.argv[2:]))
