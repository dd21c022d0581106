"""The kernels that were compiled when Baton was installed, at every dispatch level that this processor can run.

A machine with a compiler has them, or these tests fail: nobody would notice that they do not compile any more. On a
machine without a compiler there is nothing to test.
"""

from __future__ import annotations

import functools
import os
import shutil
from ctypes import CDLL
from pathlib import Path

import pytest

from baton.engine.native.library import Kernels, levels, load_library

HAS_COMPILER = any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++"))
OTHER_LIBRARY = "BATON_TEST_KERNELS"
"""An environment variable: test this library instead (see `tests.engine.native.sanitized`)."""


def library() -> CDLL:
    """The library under test. Raises `OSError`."""
    other = os.environ.get(OTHER_LIBRARY)
    return load_library(Path(other) if other else None)


def _levels_here() -> list[str]:
    try:
        return levels(library())
    except OSError:
        return ["compiled"] if HAS_COMPILER else []


LEVELS = _levels_here()
needs_kernels = pytest.mark.skipif(not LEVELS, reason="the CPU kernels are not compiled: there is no C++ compiler")


@functools.cache
def kernels(level: str, num_threads: int = 2) -> Kernels:
    """Open for the rest of the process."""
    return Kernels(library(), num_threads, level)
