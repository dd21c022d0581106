"""`python -m bench.mock_server`: the mock server for people, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence

from bench.mock_server.schedule import Schedule
from bench.mock_server.server import MockOptions, mock_server
from bench.mock_server.settings import MockServerSettings, options_of, schedule_of
from program.settings import add_flags, check_file_keys, resolve
from wire.errors import BatonError


def main(arguments: Sequence[str]) -> int:
    """Serve until told to stop; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.mock_server",
        description="An OpenAI-compatible server that has no model and answers at known times.",
        allow_abbrev=False,
    )
    add_flags(parser, MockServerSettings)
    flags = parser.parse_args(arguments)
    try:
        if flags.config:
            check_file_keys(flags.config, MockServerSettings)
        settings = resolve(MockServerSettings, flags, {})
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(schedule_of(settings), options_of(settings)))
    except BatonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(schedule: Schedule, options: MockOptions) -> None:
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    async with mock_server(schedule, options) as server:
        print(f"answering at {server.url}", flush=True)
        await asked.wait()


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.Loop
    return None
