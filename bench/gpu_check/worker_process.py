"""The process of one group of checks: `python -m bench.gpu_check.worker_process`, driven by `bench.gpu_check.run`.

Owns nothing but the dispatch: the module `bench.gpu_check.NAME_process` of a group has `open_bench(Setup)`, which
returns something with `check(name)` and `close()`.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any, Protocol, cast

from bench.child import Worker, serve_parent
from bench.gpu_check.parts_process import Setup
from bench.gpu_check.rows import Row


class Bench(Protocol):
    """The checks of one group."""

    def check(self, name: str) -> list[Row]:
        """Do one check. Raises `Unavailable` when this machine cannot."""
        ...

    def close(self) -> None:
        """Give up what it holds."""
        ...


class GroupWorker:
    """See `Worker`."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def do(self, command: str, arguments: dict[str, Any]) -> Any:
        """See `Worker`."""
        match command, arguments:
            case "check", {"name": str(name)}:
                return [row.as_json() for row in self._bench.check(name)]
            case _:
                raise ValueError(f"unknown command {command}")

    def close(self) -> None:
        """See `Worker`."""
        self._bench.close()


def open_group(group: str, setup: Setup) -> Bench:
    """The checks of a group, by its name in the plan."""
    module = importlib.import_module(f"bench.gpu_check.{group}_process")
    return cast("Bench", module.open_bench(setup))


def _begin(spec: dict[str, Any]) -> Worker:
    warnings.filterwarnings("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return GroupWorker(open_group(spec["group"], Setup(spec["device"], spec["quick"])))


if __name__ == "__main__":
    serve_parent(_begin)
    # no destructors: a library could wait for a device or a peer that has gone
    os._exit(0)
