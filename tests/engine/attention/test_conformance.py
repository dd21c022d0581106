"""Promises of every attention backend. flashinfer runs on its stand-in, so its arguments are what these tests check.
The CPU kernels run at every level of this processor."""

from __future__ import annotations

import pytest

from baton.engine.attention.choose import ChooseAttention
from baton.testing.attention import AttentionSuite
from tests.engine.attention.backends import backend
from tests.engine.native.compiled import LEVELS


class TestBackends(AttentionSuite):
    @pytest.fixture(params=("torch", "flashinfer", *LEVELS))
    def choose(self, request: pytest.FixtureRequest) -> ChooseAttention:
        return backend(request.param)
