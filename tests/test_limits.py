"""Each wait ends, and each queue, table, message and buffer is bounded: what modules say about it at their top is no
more than a program can bear, and nothing is bounded to nothing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import baton

_ROOT = Path(baton.__file__).parent
_PLACES = (
    *("kvtransfer/**/*.py", "engine/cache/**/*.py", "node/**/*.py"),
    *("router/routing/pulls.py", "router/http/stored/*.py"),
)
_LONGEST_S, _LONGEST_TURN_S, _LONGEST_LOOK_S = 60.0, 0.01, 1.0
_MOST, _MOST_REMEMBERED, _MOST_BYTES, _MOST_UNDER_WAY_BYTES = 4096, 2**16, 2**26, 2**28
_REMEMBERED = ("HASHES", "KNOWN", "LIVE", "ROWS")
"""Entries of a table, of which each is small."""


def _most(name: str) -> float | None:
    """What a limit of that name may be at most; None where it is none."""
    if name.endswith("_PER_S") or name.startswith("MIN_"):
        return None
    if name.endswith(("_SLICE_S", "_GLANCE_S")):
        return _LONGEST_TURN_S
    if name.endswith("_S"):
        return _LONGEST_LOOK_S if "_LOOK" in name or "_AGAIN" in name or "PROGRESS" in name else _LONGEST_S
    if name.endswith("_MS"):
        return 1000 * _LONGEST_LOOK_S
    if name.endswith("_BYTES"):
        return _MOST_UNDER_WAY_BYTES if "UNDER_WAY" in name or "PENDING" in name else _MOST_BYTES
    if not name.lstrip("_").startswith("MAX_"):
        return None
    return _MOST_REMEMBERED if name.endswith(_REMEMBERED) else _MOST


def _limits(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, float, float]]:
    """Names of limits in a module, what they are, and what they may be."""
    spec = importlib.util.spec_from_file_location("as_written", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "as_written", module)
    spec.loader.exec_module(module)
    for name, value in vars(module).items():
        most = _most(name) if name.isupper() and isinstance(value, int | float) else None
        if most is not None:
            yield name, value, most


@pytest.mark.parametrize("place", _PLACES)
def test_limits_are_limits(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in _ROOT.glob(place):
        for limit, value, most in _limits(path, monkeypatch):
            assert 0 < value <= most, f"{path}: {limit}"
