"""`python -m tests.bench.mock_server PORT TTFT_MS ITL_MS [HTTP_STATUS]`: the mock server alone, until SIGTERM.

With a status every request is answered by it, as an error.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from tests.bench.mock_server.schedule import Fault, FaultKind, Steady
from tests.bench.mock_server.server import MockOptions, mock_server


async def serve(port: int, ttft_ms: float, itl_ms: float, status: int = 0) -> None:
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    fault = Fault(FaultKind.HTTP_ERROR, status=status) if status else None
    async with mock_server(Steady(ttft_ms / 1e3, itl_ms / 1e3, fault), MockOptions(port)):
        await told.wait()


if __name__ == "__main__":
    port, ttft_ms, itl_ms, *status = map(float, sys.argv[1:])
    asyncio.run(serve(int(port), ttft_ms, itl_ms, *map(int, status)))
