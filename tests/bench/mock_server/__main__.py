"""`python -m tests.bench.mock_server PORT TTFT_MS ITL_MS HTTP_STATUS [BEHAVIOUR]`: the mock server, until SIGTERM.

With a status that is not 0 every request is answered by it, as an error. With a behaviour it has workers. `detached`:
they lead sessions of their own. `stubborn`: all ignore SIGTERM. `mute`: it never answers. `leaves`: it starts its
workers, the server among them, and goes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from tests.bench.mock_server.schedule import Fault, FaultKind, Steady
from tests.bench.mock_server.server import MockOptions, mock_server

_NUM_WORKERS = 2


async def serve(port: int, ttft_ms: float, itl_ms: float, status: int, behaviour: str = "") -> None:
    told = asyncio.Event()
    if behaviour != "stubborn":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    fault = Fault(FaultKind.HTTP_ERROR, status=status) if status else None
    async with mock_server(Steady(ttft_ms / 1e3, itl_ms / 1e3, fault), MockOptions(port)):
        await told.wait()


def start_workers(behaviour: str) -> None:
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(_NUM_WORKERS):
        if os.fork() == 0:
            work(behaviour)
    if behaviour == "leaves":
        leader = os.getpid()
        if os.fork():
            sys.exit()
        while os.getppid() == leader:  # it answers when its leader has gone: nobody counts one that is just leaving
            time.sleep(0.001)
    if behaviour == "mute":
        work(behaviour)


def work(behaviour: str) -> None:
    if behaviour == "detached":
        os.setsid()
    while True:
        signal.pause()


if __name__ == "__main__":
    port, ttft_ms, itl_ms, status, *behaviours = sys.argv[1:]
    for behaviour in behaviours:
        start_workers(behaviour)
    asyncio.run(serve(int(port), float(ttft_ms), float(itl_ms), int(status), *behaviours))
