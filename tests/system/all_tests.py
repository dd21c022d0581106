"""Importing this module imports the modules of all tests, as pytest does, for the process that forks those that run
tests: six times three seconds of processor time.

Invariants: what pytest does to assertions is done, warnings are errors, and no thread is left. What cannot be imported
is left to the processes that collect it, and so are tests of a GPU: its driver does not outlive a fork.
"""

from __future__ import annotations

import contextlib
from importlib import import_module

import pytest

_OPTIONS = "-o addopts=--import-mode=importlib -p no:terminal -p no:cacheprovider -p no:unraisableexception"


class _Importer:
    """Takes the place of pytest's collection, and finds no test."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        paths = (path.relative_to(session.path) for path in (session.path / "tests").rglob("test_*.py"))
        for path in paths:
            if "gpu" not in path.parts:
                with contextlib.suppress(Exception):
                    import_module(".".join(path.with_suffix("").parts))
        _read_constants()
        return True


def _read_constants() -> None:
    """Make hypothesis read the constants of all modules, which it would else do in each process."""
    from hypothesis import given, settings, strategies  # not before pytest, which rewrites it

    settings(max_examples=1, database=None)(given(strategies.none())(lambda _: None))()


pytest.main(_OPTIONS.split(), plugins=[_Importer()])
