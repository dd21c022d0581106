"""The library of the CPU kernels, compiled once for a session of tests, and pools of each level it can run."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.native.calls import Threads, load

_SOURCES = Path(__file__).parents[3] / "engine" / "native" / "src"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = os.environ.get("BATON_TEST_KERNELS") or str(tmp_path_factory.mktemp("kernels") / "kernels.so")
    if not Path(path).exists():
        flags = ["-std=c++20", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fvisibility=hidden", "-pthread"]
        includes = [f"-I{_SOURCES}", f"-I{_SOURCES / 'levels'}"]
        sources = sorted(map(str, [*_SOURCES.glob("*.cpp"), *_SOURCES.glob("levels/*.cpp")]))
        subprocess.run(["g++", *flags, *includes, *sources, "-o", path], check=True)
    return load(path)


@pytest.fixture(scope="session", params=["avx512_bf16", "avx512", "avx2", "baseline"])
def level(request: pytest.FixtureRequest, library: ctypes.CDLL) -> str:
    name: str = request.param
    if name not in library.baton_levels().decode().split(","):
        pytest.skip(f"this processor cannot run {name}")
    return name


@pytest.fixture(scope="session")
def two_threads(library: ctypes.CDLL, level: str) -> Iterator[Threads]:
    threads = Threads(library, level, 2)
    yield threads
    threads.close()


@pytest.fixture(scope="session")
def one_thread(library: ctypes.CDLL, level: str) -> Iterator[Threads]:
    threads = Threads(library, level, 1)
    yield threads
    threads.close()
