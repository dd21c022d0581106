"""What holds for every test, set before anything imports torch."""

from __future__ import annotations

import os

# Tests run on all cores at once (`make test`). With a pool of compute threads in each process as well, they would wait
# for each other by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")
