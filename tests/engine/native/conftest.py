"""Pools of each dispatch level that this processor can run."""

from __future__ import annotations

import pytest

from tests.engine.native.calls import Threads
from tests.engine.native.compiled import LEVELS
from tests.engine.native.linear_calls import Products


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def two_threads(level: str) -> Threads:
    return Threads(level, 2)


@pytest.fixture
def one_thread(level: str) -> Threads:
    return Threads(level, 1)


@pytest.fixture
def products(level: str) -> Products:
    return Products(level, 1)


@pytest.fixture
def two_threads_products(level: str) -> Products:
    return Products(level, 2)
