"""An engine of a tiny model, the pool of which is full after a few prompts, and the publisher of its events."""

from __future__ import annotations

from pathlib import Path

from baton.engine.build import build_engine
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.settings import EngineSettings
from baton.node.kv_events.config import KvEventsConfig
from baton.node.kv_events.publisher import KvEventPublisher
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.request_keys import key_of

BLOCK_SIZE, NUM_BLOCKS = 8, 24
CONFIG = KvEventsConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", topic="kv@pod@model")


class SmallNode:
    """What a node has of it, without a router."""

    def __init__(self, checkpoint: Path, config: KvEventsConfig = CONFIG) -> None:
        settings = EngineSettings(model=str(checkpoint), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, num_threads=1)
        self.engine = build_engine(settings, allocate_private)
        self.core = self.engine.core
        self.publisher = KvEventPublisher(config, BLOCK_SIZE, {})
        self.core.log_blocks(self.publisher)
        self.num_requests = 0

    def serve(self, prompt: Prompt) -> None:
        """Compute a prompt and 12 tokens behind it."""
        self.num_requests += 1
        self.core.add(key_of(self.num_requests), prompt, DecodingParams(max_tokens=12, ignore_eos=True))
        while self.core.has_work:
            self.core.step()
            self.core.take_cache_changes()

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
