"""`python -m tests.bench.mock_server`: the mock server for people, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from baton.bench.arguments import parse_alone
from baton.bench.client.driver import client_runner
from baton.runtime.ranges import COUNT, COUNT_OR_NONE, MILLISECONDS, PORT, SEED, SHARE_OR_NONE, Range
from baton.runtime.settings import setting
from baton.wire.errors import BatonError
from tests.bench.mock_server.schedule import Fault, FaultKind, Steady
from tests.bench.mock_server.server import MockOptions, mock_server

NO_FAULT = "none"


@dataclass(frozen=True, slots=True)
class MockServerSettings:
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8100, "port to listen on; 0: any", allowed=PORT)
    model: str = setting("mock", "name of the model that it lists")
    owned_by: str = setting("mock", "who owns the model; baton: clients may ask for Baton's timings, which are made up")
    ttft_ms: float = setting(50.0, "from a request to the first chunk of its answer", allowed=MILLISECONDS)
    itl_ms: float = setting(10.0, "from token to token after that", allowed=MILLISECONDS)
    jitter: float = setting(0.0, "make each time random within this share around its value", allowed=SHARE_OR_NONE)
    tokens_per_chunk: int = setting(1, "tokens that come in one event", allowed=COUNT)
    text: str = setting(" word", "text of each token")
    fault: str = setting(NO_FAULT, "what befalls some of the requests", choices=(NO_FAULT, *FaultKind))
    fault_share: float = setting(1.0, "share of the requests that it befalls", allowed=SHARE_OR_NONE)
    fault_after_chunks: int = setting(0, "chunks that come before it, where it breaks a stream", allowed=COUNT_OR_NONE)
    fault_status: int = setting(503, "status of an HTTP error", allowed=Range(400, 599))
    seed: int = setting(0, "of all that is random", allowed=SEED)


def schedule_of(settings: MockServerSettings) -> Steady:
    """Raises `InvalidSetting`."""
    fault = None
    if settings.fault != NO_FAULT:
        fault = Fault(FaultKind(settings.fault), settings.fault_after_chunks, settings.fault_status)
    times_s = settings.ttft_ms / 1e3, settings.itl_ms / 1e3, settings.jitter
    return Steady(*times_s, settings.tokens_per_chunk, settings.text, fault, settings.fault_share, seed=settings.seed)


def main(arguments: Sequence[str]) -> int:
    """Serve until told to stop; the exit status."""
    description = "An OpenAI-compatible server that has no model and answers at known times."
    try:
        settings = parse_alone("python -m tests.bench.mock_server", description, arguments, MockServerSettings)
        with client_runner() as runner:
            runner.run(_serve(settings))
    except BatonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(settings: MockServerSettings) -> None:
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    # nobody reads the records of a server on the command line, so it keeps none
    options = MockOptions(settings.host, settings.port, settings.model, settings.owned_by, max_records=0)
    async with mock_server(schedule_of(settings), options) as server:
        print(f"answering at {server.url}", flush=True)
        await asked.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
