"""`python -m tests.engine.native.sanitized`: the tests of the CPU kernels under the address and undefined-behaviour
sanitizers. Takes some minutes, needs g++ or clang++; exit status 1 when a test or a sanitizer found something.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.engine.native.compiled import OTHER_LIBRARY

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "baton" / "engine" / "native" / "src"
FLAGS = ("-std=c++20", "-O1", "-g", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
TESTS = ("tests/engine/native", "tests/engine/attention/test_kv_planes.py")
TIMEOUT_S = 1800.0


def _library(compiler: str, name: str) -> str:
    command = [compiler, f"-print-file-name={name}"]
    return subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> int:
    """Compile, and run the tests with the sanitizers' library loaded first, as they ask for."""
    compiler = os.environ.get("CXX", "g++")
    sources = [str(path) for path in (*SOURCE.glob("*.cpp"), *SOURCE.glob("levels/*.cpp"))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.so"
        subprocess.run([compiler, *FLAGS, *SANITIZERS, *sources, "-o", str(path)], check=True, timeout=TIMEOUT_S)
        # the second is what torch throws exceptions with, which the first has to find when it is loaded
        runtimes = [_library(compiler, "libasan.so"), _library(compiler, "libstdc++.so.6")]
        environment = {
            **os.environ,
            OTHER_LIBRARY: str(path),
            "LD_PRELOAD": ":".join(runtimes),
            # Python and torch keep memory to the end, and hold their own in ways that look like leaks
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        }
        tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
        return subprocess.run(tests, cwd=ROOT, env=environment, timeout=TIMEOUT_S, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
