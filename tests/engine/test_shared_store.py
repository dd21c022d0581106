"""Whole engines that share a real server: what one has computed the others load, and whatever the server does, the
tokens are those of an engine without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.engine.cache import valkey_store
from baton.engine.cache.valkey_store import ValkeyStore
from baton.engine.core import EngineCore
from baton.engine.offloading import tiers_opener
from baton.engine.settings import EngineSettings
from baton.wire.errors import InvalidSetting
from tests.checkpoints import make_checkpoint
from tests.engine.cache.valkey_servers import RunningServer, running, until
from tests.engine.test_core import prompt
from tests.engine.test_offloading import ALL_CACHED, PROMPTS, all_answers, answers, engine_of, load_whatever_is_there

ALL_SHARED = 40 + 48 + 48 + 48 + 40
"""Tokens of all rounds that another engine has computed."""


@pytest.fixture(autouse=True)
def all_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    load_whatever_is_there(monkeypatch)
    monkeypatch.setattr(valkey_store, "_TICK_S", 0.01)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    with engine_of(checkpoint) as (_, core):
        return all_answers(core)[0]


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running() as started:
        yield started


def shared(server: RunningServer, timeout_s: float = 60.0) -> dict[str, Any]:
    url = f"redis://{server.address}/0?socket_timeout={timeout_s}&socket_connect_timeout={timeout_s}"
    return {"kv_store": "valkey", "kv_store_url": url}


def evict_all(core: EngineCore) -> None:
    """Have the pool forget everything, and wait until it is on the server."""
    answers(core, "as long as the pool", [each % 64 for each in prompt(66, 66)])
    assert core.offload is not None
    store = core.offload.tiers[-1]._store
    assert isinstance(store, ValkeyStore)
    until(lambda: not store._pending)


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"device": "emulated"}], ids=str)
def test_what_one_engine_has_computed_another_one_loads(
    checkpoint: Path, server: RunningServer, settings: dict[str, Any]
) -> None:
    with engine_of(checkpoint, **settings) as (_, core):
        expected = all_answers(core)[0]
    with engine_of(checkpoint, **shared(server), **settings) as (_, core):
        assert all_answers(core) == (expected, ALL_CACHED)
        evict_all(core)
    with engine_of(checkpoint, **shared(server), **settings) as (_, core):
        assert all_answers(core) == (expected, ALL_SHARED)


def test_below_host_memory_it_gets_what_that_gives_up(
    checkpoint: Path, server: RunningServer, expected: list[list[int]]
) -> None:
    with engine_of(checkpoint) as (engine, _):
        three_blocks = 3 * engine.memory.layout.block_bytes / 2**30
    with engine_of(checkpoint, **shared(server), kv_offloading_size=three_blocks) as (_, core):
        found, num_loaded = all_answers(core)
        assert found == expected
        assert num_loaded == ALL_CACHED
        evict_all(core)
        assert server.client.dbsize() > 3
        assert core.offload is not None
        assert [tier.name for tier in core.offload.tiers] == ["host", "valkey"]
        assert all(tier.counters.num_loaded_blocks for tier in core.offload.tiers)


def test_what_host_memory_gives_up_goes_past_a_folder_that_rests(
    checkpoint: Path, server: RunningServer, tmp_path: Path
) -> None:
    with engine_of(checkpoint) as (engine, _):
        three_blocks = 3 * engine.memory.layout.block_bytes / 2**30
    settings = {**shared(server), "kv_offloading_size": three_blocks, "kv_disk": str(tmp_path)}
    with engine_of(checkpoint, **settings) as (_, core):
        assert core.offload is not None
        host, disk, valkey = core.offload.tiers
        disk._leave_alone("put", "is full")
        answers(core, "first", PROMPTS[0])
        evict_all(core)
        assert server.client.dbsize() > 0
        assert (host.counters.num_dropped_blocks, disk.counters.num_stored_blocks) == (0, 0)
        valkey._leave_alone("put", "is full")
        answers(core, "other", PROMPTS[1])
        answers(core, "as long as the pool", [each % 64 for each in prompt(67, 67)])
        assert host.counters.num_dropped_blocks > 0


def test_tenants_do_not_share_what_is_on_the_server(checkpoint: Path, server: RunningServer) -> None:
    for salt, num_cached in ((b"a", 0), (b"a", 40), (b"b", 0)):
        with engine_of(checkpoint, **shared(server)) as (_, core):
            assert answers(core, "first", PROMPTS[0], salt)[1] == num_cached
            answers(core, "other", PROMPTS[1])
            evict_all(core)


def keys(server: RunningServer) -> list[bytes]:
    return list(server.client.scan_iter())


def flip(server: RunningServer) -> None:
    for key in keys(server):
        server.client.setrange(key, 100, bytes([255 - server.client.getrange(key, 100, 100)[0]]))


def mix_up(server: RunningServer) -> None:
    first, *others = keys(server)
    for key in others:
        server.client.copy(first, key, replace=True)


def cut(server: RunningServer) -> None:
    for key in keys(server):
        server.client.set(key, server.client.get(key)[:-1])


def fill(server: RunningServer) -> None:
    server.client.flushall()
    server.client.config_set("maxmemory", "1kb")


def leave_out(server: RunningServer) -> None:
    server.client.delete(*keys(server)[::2])


def close_doors(server: RunningServer) -> None:
    server.client.config_set("requirepass", "secret")


FAULTS: dict[str, tuple[Callable[[RunningServer], None], str]] = {
    "flips bits": (flip, "gave a block with wrong bytes"),
    "mixes blocks up": (mix_up, "gave a block with wrong bytes"),
    "cuts blocks": (cut, ""),
    "is full": (fill, "keeps nothing for 5 s: OutOfMemoryError"),
    "has forgotten half of the blocks": (leave_out, ""),
    "wants a password": (close_doors, "AuthenticationError"),
    "is gone": (RunningServer.kill, "ConnectionError"),
    "hangs": (RunningServer.freeze, "TimeoutError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_the_server_does_no_token_is_wrong_and_no_block_is_lost(
    checkpoint: Path,
    server: RunningServer,
    expected: list[list[int]],
    fault: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    harm, message = FAULTS[fault]
    with engine_of(checkpoint, **shared(server)) as (_, core):
        all_answers(core)
        evict_all(core)
    with engine_of(checkpoint, **shared(server, 0.2)) as (_, core):
        harm(server)
        found, num_cached = all_answers(core)
        assert found == expected
        assert num_cached < ALL_SHARED
        assert core.status().num_held_blocks == 0
        assert core.offload is not None
        assert (core.offload.tiers[0].counters.num_damaged_blocks > 0) == (harm in (flip, mix_up, cut))
        until(lambda: message in caplog.text)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kv_store": "valkey"}, "need each other"),
        ({"kv_store_url": "redis://127.0.0.1:6379"}, "need each other"),
        ({"kv_store": "valkey", "kv_store_url": "http://x:horse@127.0.0.1"}, "--kv-store-url is no address"),
    ],
)
def test_a_server_that_cannot_be_is_refused_before_anything_is_loaded(settings: dict[str, Any], reason: str) -> None:
    chosen = EngineSettings(model="nowhere", **settings)
    with pytest.raises(InvalidSetting, match=reason) as caught:
        tiers_opener(chosen)
    assert "horse" not in f"{caught.value}{chosen!r}"
