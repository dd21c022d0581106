"""Runs the tests of the Triton kernels, each file in a process of its own: see there why. The compiler is imported by
most nodes, so its process is forked; the interpreter is chosen before anything is imported.

What was compiled is kept between runs beside pytest's own cache. Triton knows it by a digest of the kernel, of the
compiler and of what it was compiled for, so a kernel that was changed is compiled again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.prepared import NODE_MODULES, prepared_python

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]


def arguments(name: str) -> list[str]:
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)]


def environment(pytestconfig: pytest.Config, interpret: str) -> dict[str, str]:
    kept = ROOT if pytestconfig.cache is None else pytestconfig.cache.mkdir("triton")
    return {**os.environ, "TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(kept)}


def test_interpreted_kernels(pytestconfig: pytest.Config) -> None:
    child = subprocess.run(
        [sys.executable, *arguments("triton_interpreted.py")],
        cwd=ROOT,
        env=environment(pytestconfig, "1"),
        timeout=280,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert child.returncode == 0, child.stdout


def test_compiled_kernels(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+b") as out:
        python = prepared_python(*NODE_MODULES)
        child = python.start(arguments("triton_compiled.py"), environment(pytestconfig, "0"), out, out)
        assert child.wait(280) == 0, (tmp_path / "out").read_text()
