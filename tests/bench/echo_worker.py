"""A child that does what tests of `bench.child` want. A program of its own."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from bench.child import serve_parent
from wire.errors import TransferFailed


class EchoWorker:
    def __init__(self, spec: dict[str, Any]) -> None:
        if spec.get("fails"):
            raise TransferFailed("it was to fail")

    def do(self, command: str, arguments: dict[str, Any]) -> Any:
        match command:
            case "echo":
                return arguments
            case "cores":
                return sorted(os.sched_getaffinity(0))
            case "print":
                os.write(1, b"something that a library prints\n")
                return "printed"
            case "sleep":
                time.sleep(60)
            case "die":
                os._exit(3)
            case _:
                raise ValueError(command)

    def close(self) -> None:
        sys.stderr.write("closed\n")


if __name__ == "__main__":
    serve_parent(EchoWorker)
