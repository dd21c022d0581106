"""Nodes whose ranks are on several machines: as many `baton rank` on other loopback addresses of this one, or in a
network namespace."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.free_port import free_port
from tests.system.harness import Program, Starter, started, wait_until

HERE = "127.0.0.1"
END_S = 5.0
_RANK = "baton.ranks"


class Machine:
    """One `baton rank` for the driver at `driver`. `start`: runs a program on it."""

    def __init__(
        self, name: str, model: Path, folder: Path, driver: str, host: str, *flags: str, start: Starter = started
    ) -> None:
        command = ["-m", "baton.ranks.command", str(model), "--driver", driver, "--host", host, "--num-threads", "1"]
        self.program = Program(name, [*command, *flags], folder, start)
        self.program.wait_ready()

    @property
    def ranks(self) -> list[psutil.Process]:
        """Its ranks, in the order of their numbers."""
        ranks = []
        for child in psutil.Process(self.program.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and nobody has taken note yet
                if _RANK in child.cmdline():
                    ranks.append(child)
        return sorted(ranks, key=lambda child: (child.create_time(), child.pid))

    def wait_idle(self, timeout_s: float = END_S) -> None:
        """Wait until it has no ranks."""
        wait_until(lambda: not self.ranks, f"{self.program.name} has no ranks", timeout_s)

    def stop(self) -> None:
        """SIGTERM, which ends it at once when its driver is gone."""
        self.program.signal(signal.SIGTERM)
        assert self.program.wait_exit() == 0
        self.program.require_nothing_left()


@contextlib.contextmanager
def machines(count: int, model: Path, folder: Path, name: str) -> Iterator[tuple[str, ...]]:
    """So many machines for one node, the node's own among them; the flags of the node. At the end the node is gone."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port(HERE)
    running = [
        Machine(f"{name}-machine-{number}", model, folder, f"{HERE}:{port}", f"127.0.0.{number + 1}")
        for number in range(1, count)
    ]
    try:
        yield "--rank-machines", str(count), "--rank-port", str(port), "--rank-pools", "own"
        for machine in running:
            machine.wait_idle()
            machine.stop()
    finally:
        for machine in running:
            if machine.program.is_running:
                machine.program.kill()
