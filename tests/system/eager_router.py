"""A real router that pulls whatever it can, and waits BOUND_S for it: `eager_router.py BOUND_S MODEL FLAG...`."""

from __future__ import annotations

import sys
from functools import partial
from unittest import mock

from baton.router.__main__ import main
from tests.router.eager_ways import EagerWays

if __name__ == "__main__":
    relay = "baton.router.requests.relay"
    ways = mock.patch(f"{relay}.PrefixWays", partial(EagerWays, bound_s=float(sys.argv[1])))
    # its policies take nodes in turns, so that there is something to pull
    with ways, mock.patch(f"{relay}._look_at_caches", return_value=True):
        sys.exit(main(sys.argv[2:]))
