"""Helpers: targets that are mock servers of known timing, and the flags of a load of random token ids for them."""

from __future__ import annotations

import shlex
import sys

from tests.free_port import free_port

LOAD = ("--vocab-size=1000", "--random-input-len=16", "--random-output-len=4", "--ignore-eos", "--disable-tqdm")


def mock_target(name: str, **settings: float) -> str:
    """`NAME=COMMAND @ URL`; settings as `ttft_ms=5`."""
    port = free_port()
    flags = [f"--{key.replace('_', '-')}={value:g}" for key, value in settings.items()]
    command = shlex.join([sys.executable, "-m", "tests.bench.mock_server", f"--port={port}", *flags])
    return f"{name}={command} @ http://127.0.0.1:{port}"
