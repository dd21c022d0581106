"""The GPU of these tests. Their modules skip themselves where torch sees none; everything else of the suite runs
everywhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from device.base import Device
from device.choose import open_device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of libraries that only a machine with a GPU has are no failures."""
    for item in items:
        if "/tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    """As a node opens it."""
    opened = open_device("cuda")
    yield opened
    opened.synchronize()
    opened.close()
