"""What holds for every test of the engine."""

from __future__ import annotations

import pytest

from baton.engine.scheduler import output_ends


@pytest.fixture(autouse=True)
def _no_jump_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine forced tokens would end early, and come with the next step."""
    monkeypatch.setattr(output_ends, "MAX_JUMP_S", 60.0)
