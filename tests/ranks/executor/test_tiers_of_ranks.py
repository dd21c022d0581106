"""Tiers of nodes of several ranks: the tokens are those of one rank without tiers, whatever the tiers of a rank do.

Ranks are threads here. Processes are in `test_ranks.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.engine.build import Engine, build_engine
from baton.engine.cache import load_choice
from baton.engine.cache.disk.batch_file import read_header
from baton.engine.cache.hashing import block_hashes
from baton.engine.cache.host_tier import HostTier
from baton.engine.cache.offload import KvOffload
from baton.engine.cache.tiered_pool import TieredPool
from baton.engine.runner.kv_memory import allocate_shared
from baton.engine.settings import OWN, EngineSettings
from baton.wire.errors import InvalidSetting
from baton.wire.prompt import Prompt
from tests.checkpoints import make_checkpoint
from tests.engine.cache.disk.tiers_on_disk import until
from tests.engine.test_core import prompt
from tests.engine.test_offloading import ALL_CACHED, PROMPTS, all_answers, answers, engine_of, load_whatever_is_there
from tests.ranks.executor.thread_ranks import ThreadExecutor, built
from tests.request_keys import key_of

_OWN_TENSOR_PARALLEL: dict[str, Any] = {"size": 2, "rank_pools": OWN}
KINDS: dict[str, dict[str, Any]] = {
    "tensor parallel": {"size": 2},
    "stages": {"size": 1, "num_stages": 2},
    "tensor parallel, own pools": _OWN_TENSOR_PARALLEL,
    "stages, own pools": {"size": 1, "num_stages": 2, "rank_pools": OWN},
    "both, own pools": {"size": 2, "num_stages": 2, "rank_pools": OWN},
    "stages, own pools, asynchronous device": {"size": 1, "num_stages": 2, "rank_pools": OWN, "device": "emulated"},
}
FILLS_THE_POOL = [each % 64 for each in prompt(64, 64)]


@pytest.fixture(autouse=True)
def all_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    load_whatever_is_there(monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The tokens of `ROUNDS`."""
    with engine_of(checkpoint) as (_, core):
        return all_answers(core)[0]


@contextmanager
def ranks_of(folder: Path, **chosen: Any) -> Iterator[tuple[Engine, ThreadExecutor]]:
    """An engine whose pools hold one of the prompts."""
    engine, executor = built(folder, **{"block_size": 8, "num_blocks": 9, "max_num_batched_tokens": 32, **chosen})
    try:
        yield engine, executor
    finally:
        engine.core.close()
        executor.close()
        engine.device.close()


def offload_of(engine: Engine) -> KvOffload:
    assert engine.core.offload is not None
    return engine.core.offload


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_one_rank_without_a_tier(checkpoint: Path, expected: list[list[int]], kind: str) -> None:
    with ranks_of(checkpoint, kv_offloading_size=0.01, **KINDS[kind]) as (engine, executor):
        assert all_answers(engine.core) == (expected, ALL_CACHED)
        assert bool(executor.pools) == ("rank_pools" in KINDS[kind])


@pytest.mark.parametrize("kind", ["tensor parallel, own pools", "stages, own pools"])
def test_a_block_that_is_damaged_at_one_rank_is_computed_and_is_whole_again(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path, kind: str
) -> None:
    hits: list[int] = []
    for life in range(2):
        with ranks_of(checkpoint, kv_disk=str(tmp_path), **KINDS[kind]) as (engine, executor):
            hashes = block_hashes(engine.fingerprint, Prompt.of(PROMPTS[0]), (), 8)
            for each in (offload_of(engine)._pool, executor.pools[1]) if life else ():
                until(lambda each=each, hashes=hashes: each.tiers.names(hashes))  # type: ignore[misc]  # it looks at files
            for turn in range(1 + life):
                found, num_cached = answers(engine.core, f"first {turn}", PROMPTS[0])
                hits.append(num_cached)
                assert found == expected[0]
                answers(engine.core, f"other {turn}", FILLS_THE_POOL)
        if life == 0:
            folder, _ = tmp_path.iterdir()  # of one rank
            damage(folder, hashes[3])
    assert hits == [0, 24, 40]


@pytest.mark.parametrize("kind", ["tensor parallel", "tensor parallel, own pools", "stages, own pools"])
def test_before_a_planned_end_every_rank_saves_its_pool(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path, kind: str
) -> None:
    for num_cached in (0, 40):
        with ranks_of(checkpoint, kv_disk=str(tmp_path), **KINDS[kind]) as (engine, executor):
            hashes = block_hashes(engine.fingerprint, Prompt.of(PROMPTS[0]), (), 8)[:5]
            for each in {offload_of(engine)._pool, *executor.pools.values()} if num_cached else ():
                until(lambda each=each, hashes=hashes: len(each.tiers.names(hashes)) == 5)  # type: ignore[misc]
            assert answers(engine.core, "first", PROMPTS[0]) == (expected[0], num_cached)
            engine.core.save(lambda: 60.0)


def damage(folder: Path, block_hash: bytes) -> None:
    """Flip a bit of this block, wherever it is."""
    for path in folder.glob("*.kv"):
        with path.open("r+b") as file:
            header = read_header(file.fileno())
            for number, (each, _) in enumerate(header.entries):
                if each == block_hash:
                    file.seek(header.block_offset(number) + 5)
                    (byte,) = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte ^ 4]))


def test_a_rank_that_gives_nothing_costs_its_time_and_holds_no_block_for_ever(
    checkpoint: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranks_of(checkpoint, kv_offloading_size=0.01, **_OWN_TENSOR_PARALLEL) as (engine, executor):
        core = engine.core
        answers(core, "a", PROMPTS[0])
        answers(core, "b", FILLS_THE_POOL)
        monkeypatch.setattr(HostTier, "load", _silent_for(executor.pools[1], HostTier.load))
        monkeypatch.setattr(load_choice, "LATENCY_S", 0.05)
        assert answers(core, "c", PROMPTS[0]) == (expected[0], 0)
        assert offload_of(engine).counters.num_late_loads == 1
        assert core.handoffs.reserve(key_of("handoff"), Prompt.of(PROMPTS[1])) is not None


def _silent_for(pool: TieredPool, load: Callable[..., None]) -> Callable[..., None]:
    """`load` for all tiers but those below `pool`."""
    store = pool.tiers.tiers[0]._store

    def load_or_not(self: HostTier, hashes: list[bytes], landing: Any) -> None:
        if self is not store:
            load(self, hashes, landing)

    return load_or_not


def test_host_memory_is_the_nodes_and_all_ranks_have_room_for_as_many_blocks(checkpoint: Path) -> None:
    sizes: list[tuple[int, int]] = []
    for kind in ("tensor parallel", "both, own pools"):
        with ranks_of(checkpoint, kv_offloading_size=0.001, **KINDS[kind]) as (engine, executor):
            pools = [offload_of(engine)._pool, *executor.pools.values()]
            stores = [pool.tiers.tiers[0]._store for pool in pools]
            counts = [len(store._memory) for store in stores if isinstance(store, HostTier)]
            assert counts == counts[:1] * (4 if executor.pools else 1)
            sizes.append((counts[0], sum(count * pool.block_bytes for count, pool in zip(counts, pools, strict=True))))
    assert sizes[0] == sizes[1]
    assert 0.99 < sizes[0][1] / (0.001 * 2**30) <= 1.0


def test_a_store_of_the_program_is_refused_where_each_rank_has_a_pool(checkpoint: Path) -> None:
    settings = EngineSettings(str(checkpoint), num_blocks=9, tensor_parallel_size=2, rank_pools=OWN)
    with pytest.raises(InvalidSetting, match="here each rank has its own"):
        build_engine(settings, allocate_shared, open_executor=ThreadExecutor, open_store=lambda kind: None)  # type: ignore[arg-type, return-value]
