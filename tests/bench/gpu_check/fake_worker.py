"""The process of a group that does what tests of `bench.gpu_check.run` want. A program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from bench.child import serve_parent
from bench.gpu_check.rows import error_row, figure_row
from bench.gpu_check.run import UNAVAILABLE
from wire.errors import RequestFailed


class FakeWorker:
    def __init__(self, spec: dict[str, Any]) -> None:
        self._group = spec["group"]
        if spec["group"] == "cannot begin":
            raise RequestFailed("there is no such device")

    def do(self, command: str, arguments: dict[str, Any]) -> Any:
        name = arguments["name"]
        if name == "crash":
            os._exit(3)
        if name == "hang":
            time.sleep(600)
        if name == "hang with a child":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", self._group])
            time.sleep(600)
        if name == "raise":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if name == "missing":
            raise RequestFailed(UNAVAILABLE + "nccl needs two GPUs")
        if name == "nothing":
            return []
        if name == "garbage":
            return [{"verdict": "splendid"}]
        if name == "pid":
            return [error_row(str(os.getpid()), "", 0.0, 1.0).as_json()]
        num_cases = {"few": 2, "many": 3}.get(name, 1)
        return [
            error_row(name, "case", 5.0 if name == "wrong" else 0.5, 1.0, num_cases=num_cases).as_json(),
            figure_row(name, "speed", 7.0, "ms").as_json() | {"num_cases": 0},
        ]

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve_parent(FakeWorker)
