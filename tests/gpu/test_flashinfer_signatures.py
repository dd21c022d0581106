"""Whether the installed flashinfer takes what the tests' stand-in takes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.engine.attention.flashinfer_signatures import differences

PACKAGE = importlib.util.find_spec("flashinfer")


@pytest.mark.skipif(PACKAGE is None, reason="flashinfer is not installed")
def test_the_stand_in_and_the_installed_package_take_the_same_arguments() -> None:
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    assert list(differences(Path(PACKAGE.origin).parent)) == []
