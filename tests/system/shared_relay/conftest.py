"""The one relay of this folder: a node takes seconds to start, so the tests vary requests, not processes.

All tests of the folder run in one process (`tests/conftest.py`): the relay is started once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.conftest import Checkpoints, running
from tests.system.harness import Relay, start_relay

EVENTS = (
    "--kv-events-config",
    '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}',
)
LLAMA_PREFILL = (
    ("--max-num-batched-tokens", "16", *EVENTS),
    ("--no-enable-prefix-caching", "--num-blocks", "40"),
)
LLAMA_DECODE = (
    ("--kv-transport", "shm"),
    ("--kv-transport", "zmq", "--no-enable-prefix-caching"),
    ("--kv-transport", "shm", "--num-blocks", "40", *EVENTS),
)
ROUND_ROBIN = ("--prefill-policy", "round_robin", "--decode-policy", "round_robin", "--local-prefill-tokens", "0")


@pytest.fixture(scope="package")
def llama_relay(
    checkpoints: Checkpoints, relays: list[Relay], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Relay]:
    """Two prefill nodes (small chunks; large chunks without a prefix cache in a small pool) and three decode nodes
    (shm; zmq without a prefix cache; shm with a small pool), each request on the next of each. The first and the last
    publish KV events."""
    relay = start_relay(
        checkpoints("llama"),
        tmp_path_factory.mktemp("llama-relay"),
        prefill=LLAMA_PREFILL,
        decode=LLAMA_DECODE,
        router=ROUND_ROBIN,
    )
    yield from running(relay, relays)
