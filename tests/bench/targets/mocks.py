"""Helpers: targets that are mock servers of known timing, and the flags of a load of random token ids for them."""

from __future__ import annotations

import shlex
import sys

from tests.free_port import free_port

LOAD = ("--vocab-size=1000", "--random-input-len=16", "--random-output-len=4", "--ignore-eos", "--disable-tqdm")


def mock_target(name: str, *behaviours: str, ttft_ms: float = 1, itl_ms: float = 1, status: int = 0) -> str:
    """`NAME=COMMAND @ URL`. With a status every request is answered by it."""
    port = free_port()
    words = (str(port), f"{ttft_ms:g}", f"{itl_ms:g}", str(status), *behaviours)
    return f"{name}={shlex.join([sys.executable, '-m', 'tests.bench.mock_server', *words])} @ http://127.0.0.1:{port}"
