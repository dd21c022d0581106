"""An engine of a tiny model, the pool of which is full after a few prompts, and the publisher of its events."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from baton.engine.build import build_engine
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.settings import EngineSettings
from baton.node.kv_events.config import KvEventsConfig
from baton.node.kv_events.publisher import KvEventPublisher
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.request_keys import key_of

BLOCK_SIZE, NUM_BLOCKS = 8, 24
_BLOCK_BYTES = 4096
HOST_GIB, DISK_GIB = 12 * _BLOCK_BYTES / 2**30, 41 * _BLOCK_BYTES / 2**30
CONFIG = KvEventsConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", topic="kv@pod@model")


class SmallNode:
    """What a node has of it, without a router. `disk`: the folder of a tier below a host tier of a few blocks."""

    def __init__(self, checkpoint: Path, config: KvEventsConfig = CONFIG, disk: Path | None = None) -> None:
        tiers: dict[str, Any] = (
            {} if disk is None else {"kv_offloading_size": HOST_GIB, "kv_disk": str(disk), "kv_disk_size": DISK_GIB}
        )
        settings = EngineSettings(
            model=str(checkpoint), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, num_threads=1, **tiers
        )
        self.engine = build_engine(settings, allocate_private)
        self.core = self.engine.core
        below = self.core.offload.tiers if self.core.offload is not None else ()
        self.publisher = KvEventPublisher(config, BLOCK_SIZE, {}, below, NUM_BLOCKS)
        self.core.log_blocks(self.publisher)
        self.num_requests = 0

    def serve(self, prompt: Prompt) -> None:
        """Compute a prompt and 12 tokens behind it."""
        self.num_requests += 1
        self.core.add(key_of(self.num_requests), prompt, DecodingParams(max_tokens=12, ignore_eos=True))
        while self.core.has_work:
            self.core.step()
            self.core.take_cache_changes()

    def in_tiers(self, hashes: Iterable[bytes]) -> list[set[int]]:
        """Those of these blocks that each of its tiers has, as they are published."""
        tiers = self.core.offload.tiers if self.core.offload is not None else ()
        return [{int.from_bytes(each[-8:], "big") for each in hashes if tier.holds(each)} for tier in tiers]

    @property
    def last_number(self) -> int:
        """Of the batches that were published."""
        return self.publisher.num_batches - 1

    @property
    def hashes(self) -> set[int]:
        """Of the findable blocks of the pool, as they are published."""
        return {int.from_bytes(each[-8:], "big") for each in self.core.cached_hashes()}

    def close(self) -> None:
        """End all of it."""
        self.publisher.close()
        self.core.close()
        self.engine.executor.close()
        self.engine.device.close()
