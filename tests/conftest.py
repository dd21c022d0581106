"""What holds for every test, set before anything imports torch."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

# Tests run on all cores at once (`make test`). With a pool of compute threads in each process as well, they would wait
# for each other by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes depends on how busy the machine is.
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole relays come first: they take longest, and no core should wait for the other at the end."""
    items.sort(key=lambda item: "/tests/system/" not in item.path.as_posix())


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: no garbage collection has to look at it again."""
    gc.collect()
    gc.freeze()
