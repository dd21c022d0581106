"""What holds for every test, set before anything imports torch."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.system.prepared import NODE_MODULES, ROUTER_MODULES, fork_workers

# Tests run on all cores at once (`make test`). With a pool of compute threads in each process as well, they would wait
# for each other by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes depends on how busy the machine is.
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")

_IMPORTED_BY_MOST = (
    "baton.engine.models.modelling.loading",
    "baton.engine.models.vision.tower",
    "execnet",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "openai.resources",
    "openapi_spec_validator",
    "transformers.models.qwen3.modeling_qwen3",
)
"""With what nodes and routers import: nearly all that a process has imported which has collected the tests, and what
nodes import for some models."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole relays come first: they take longest, and no core should wait for the other at the end."""
    items.sort(key=lambda item: "/tests/system/" not in item.path.as_posix())


class _ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """The tests of a file stay in one process, and so do those of a folder that shares a relay of five nodes. Simulated
    schedules share nothing, and are many."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        if file.endswith("/simulation/test_schedules.py"):
            return nodeid
        folder = file.rpartition("/")[0]
        return folder if folder.endswith("/shared_relay") else file


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Three processes for each core: half of the time a test waits for another process or a clock. Each process takes
    about a gigabyte, and no more than sixteen find work of their own."""
    return min(3 * len(os.sched_getaffinity(0)), 16)


def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """The processes of a run of everything are forked from one that has the imports of most of them: six times seven
    seconds of processor time. A run of a few files imports what these need."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and sys.platform == "linux":
        fork_workers(specs, (*NODE_MODULES, *ROUTER_MODULES, *_IMPORTED_BY_MOST))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    """How tests are divided among the processes of `make test`."""
    return _ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing is garbage while hundreds of modules are imported, and looking for it takes a while in every process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: no garbage collection has to look at it, and garbage in cycles
    is little, so that it may wait. The loggers of torch hand on what they are told: pytest would else attach its
    handlers to each of fifty, six times a test."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Of a test that goes well, the process that counts is told one thing instead of five: it has passed."""
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True
