"""The backend that tests of the controller play does what a backend has to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.launch.cluster.conformance import CASES, Rig
from tests.launch.cluster.fake_backend import FakeBackend, FakeRig, World


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_played_backend_conforms(case: Callable[[Rig], None]) -> None:
    world = World()
    case(FakeRig(FakeBackend(world), world))
