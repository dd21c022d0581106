"""A child that does what tests of `baton.bench.child` want. A program of its own."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from baton.bench.child import serve_parent


class EchoWorker:
    def echo(self, **arguments: Any) -> dict[str, Any]:
        return arguments

    def print(self) -> str:
        os.write(1, b"something that a library prints\n")
        return "printed"

    def sleep(self) -> None:
        time.sleep(60)

    def die(self) -> None:
        os._exit(3)

    def strange(self) -> None:
        raise ValueError("strange")

    def close(self) -> None:
        sys.stderr.write("closed\n")


if __name__ == "__main__":
    serve_parent(lambda spec: EchoWorker())
