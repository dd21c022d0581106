"""Baton's own transports do what every transport must do."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from baton.testing.transports.suite import TransportSuite
from tests.kvtransfer.transports.own_transports import place_of

_NIXL = ("NIXL", "NIXL_THREAD") if find_spec("nixl") else ()


class TestTransports(TransportSuite):
    @pytest.fixture(params=("SHM", "ZMQ", "DEVICE_ZMQ", "DEVICE_SLOTS", "NCCL", *_NIXL), scope="class")
    @classmethod
    def transport(cls, request: pytest.FixtureRequest) -> str:
        return place_of(request.param)


class TestLoopback(TransportSuite):
    """What the tests of handoffs run on."""

    is_in_process = True

    @pytest.fixture(params=("MAILBOX", "MEMORY"), scope="class")
    @classmethod
    def transport(cls, request: pytest.FixtureRequest) -> str:
        return place_of(request.param)
