"""Runs the tests of the Triton kernels, each file in a process of its own: see there why.

What was compiled is kept between runs beside pytest's own cache. Triton knows it by a digest of the kernel, of the
compiler and of what it was compiled for, so a kernel that was changed is compiled again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]


@pytest.mark.parametrize(("name", "interpret"), [("triton_interpreted.py", "1"), ("triton_compiled.py", "0")])
def test_kernels(name: str, interpret: str, pytestconfig: pytest.Config) -> None:
    kept = ROOT if pytestconfig.cache is None else pytestconfig.cache.mkdir("triton")
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(kept)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)]
    child = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=280, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert child.returncode == 0, child.stdout
