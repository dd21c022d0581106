"""Whole engines whose pool is small and whose KV comes back from a store: the tokens are those of an engine without."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton import LLM, SamplingParams
from baton.engine.build import Engine, build_engine
from baton.engine.cache import load_choice, tiers
from baton.engine.cache.hashing import block_hashes
from baton.engine.cache.host_tier import HostTier
from baton.engine.cache.store import Landing, StoredBlock
from baton.engine.cache.tiered_pool import TieredPool
from baton.engine.core import EngineCore
from baton.engine.handoffs import FirstToken
from baton.engine.offloading import StoreOpener
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.settings import EngineSettings
from baton.runtime.plugins import KV_STORES
from baton.wire.errors import InvalidSetting
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from baton.wire.step_cost import StepCost
from baton.wire.tiers import TierUsage
from tests.checkpoints import make_checkpoint
from tests.engine.cache.disk.tiers_on_disk import until
from tests.engine.models.families import make_model
from tests.engine.test_core import prompt
from tests.installed_package import install
from tests.request_keys import key_of

GREEDY = DecodingParams(temperature=0, max_tokens=6, ignore_eos=True)
_FIRST, _OTHER, _END = ([each % 64 for each in prompt(count, count)] for count in (45, 50, 9))
PROMPTS = [_FIRST, _OTHER, _FIRST[:40] + _END]
"""Two of them begin with the same 40 tokens, which are 5 blocks."""
ROUNDS = (0, 1, 2, 1, 0)
ALL_CACHED = 40 + 48 + 40
"""Tokens of the last three rounds that were computed before."""


def load_whatever_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models compute as fast as their KV is loaded. So nobody knows here what computing takes, and no load is
    late."""
    monkeypatch.setattr(StepCost, "knows_prompts", False)
    for module in (load_choice, tiers):
        monkeypatch.setattr(module, "LATENCY_S", 60.0)


@pytest.fixture(autouse=True)
def all_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    load_whatever_is_there(monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def of_family(folder: Path, family: str) -> Path:
    make_model(folder, family)
    return folder


@contextmanager
def engine_of(
    folder: Path, open_store: StoreOpener | None = None, **settings: Any
) -> Iterator[tuple[Engine, EngineCore]]:
    """An engine whose pool holds one of the prompts."""
    chosen = {"block_size": 8, "num_blocks": 9, "num_threads": 1, **settings}
    engine = build_engine(EngineSettings(model=str(folder), **chosen), allocate_private, open_store=open_store)
    try:
        yield engine, engine.core
    finally:
        engine.core.close()
        engine.executor.close()
        engine.device.close()


def answers(core: EngineCore, name: str, token_ids: Sequence[int], salt: bytes = b"") -> tuple[list[int], int]:
    """(the tokens of a request, how many of its prompt were cached)."""
    tokens, num_cached = list[int](), 0
    core.add(key_of(name), Prompt.of(token_ids, salt), GREEDY)
    while core.has_work:
        outputs = core.step()
        if not outputs and core.awaits_readiness:
            time.sleep(0.001)
        for output in outputs:
            assert not output.has_failed
            tokens += output.token_ids
            num_cached = output.num_cached_tokens
        core.check()
    return tokens, num_cached


def all_answers(core: EngineCore) -> tuple[list[list[int]], int]:
    """The tokens of `ROUNDS`, one after the other, and the cached tokens of all."""
    found = [answers(core, str(place), PROMPTS[number]) for place, number in enumerate(ROUNDS)]
    return [tokens for tokens, _ in found], sum(num_cached for _, num_cached in found)


CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "torch": {"attention_backend": "torch", "cpu_kernels": "torch"},
    "asynchronous device": {"device": "emulated"},
    "asynchronous device, fp8": {"device": "emulated", "kv_cache_dtype": "fp8"},
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_an_engine_without_a_tier(checkpoint: Path, case: str) -> None:
    with engine_of(checkpoint, **CASES[case]) as (_, core):
        expected, num_cached = all_answers(core)
    with engine_of(checkpoint, kv_offloading_size=0.01, **CASES[case]) as (_, core):
        found, num_loaded = all_answers(core)
        assert core.offload is not None
        assert core.offload.counters.num_loaded_tokens == num_loaded - num_cached > 40
    assert num_loaded == ALL_CACHED
    assert found == expected


def test_choices_of_one_prompt_share_what_was_loaded(checkpoint: Path) -> None:
    params = DecodingParams(temperature=1.0, seed=7, max_tokens=6, ignore_eos=True)

    def choices(core: EngineCore, name: str) -> tuple[dict[RequestKey, list[int]], int]:
        keys = [key_of(f"{name} {number}") for number in range(3)]
        core.add(keys[0], Prompt.of(_FIRST[:24]), params, forks=keys[1:])
        found, num_cached = dict[RequestKey, list[int]](), 0
        while core.has_work:
            for output in core.step():
                found[output.key] = [*found.get(output.key, ()), *output.token_ids]
                num_cached = max(num_cached, output.num_cached_tokens)
            core.check()
        return found, num_cached

    with engine_of(checkpoint) as (_, core):
        expected, _ = choices(core, "a")
    with engine_of(checkpoint, kv_offloading_size=0.01) as (_, core):
        assert choices(core, "a") == (expected, 0)
        answers(core, "other", PROMPTS[1])
        found, num_cached = choices(core, "b")
    assert (list(found.values()), num_cached) == (list(expected.values()), 16)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("family", ["lfm2", "qwen3-next", "deepseek-v3", "gemma3"])
def test_states_latents_and_windows_come_back_as_well(tmp_path: Path, family: str, device: str) -> None:
    folder = of_family(tmp_path, family)
    with engine_of(folder, device=device) as (_, core):
        expected, num_cached = all_answers(core)
    with engine_of(folder, device=device, kv_offloading_size=0.01) as (_, core):
        found, num_loaded = all_answers(core)
    assert found == expected
    assert num_cached < num_loaded == ALL_CACHED


def until_it_knows(engine: Engine, token_ids: Sequence[int]) -> None:
    """Wait until a node that has just started has seen in its folder all whole blocks of a prompt."""
    offload = engine.core.offload
    assert offload is not None
    hashes = block_hashes(engine.fingerprint, Prompt.of(token_ids), (), 8)
    until(lambda: offload.tiers[-1].lookup(hashes) == len(hashes))


@pytest.mark.parametrize("case", ["float32", "fp8", "asynchronous device"])
def test_tokens_are_the_same_from_a_folder_also_after_a_restart(checkpoint: Path, tmp_path: Path, case: str) -> None:
    with engine_of(checkpoint, **CASES[case]) as (_, core):
        expected, _ = all_answers(core)
    with engine_of(checkpoint, kv_disk=str(tmp_path), **CASES[case]) as (_, core):
        assert all_answers(core) == (expected, ALL_CACHED)
        answers(core, "of the whole pool", [7] * 64)
    with engine_of(checkpoint, kv_disk=str(tmp_path), **CASES[case]) as (engine, core):
        until_it_knows(engine, PROMPTS[0])
        assert answers(core, "again", PROMPTS[0]) == (expected[0], 40)


@pytest.mark.parametrize("family", ["lfm2", "deepseek-v3"])
def test_states_and_latents_are_the_same_from_memory_over_a_folder(tmp_path: Path, family: str) -> None:
    folder, cache = of_family(tmp_path / "model", family), tmp_path / "cache"
    cache.mkdir()
    with engine_of(folder) as (engine, core):
        expected, _ = all_answers(core)
        two_blocks = 2 * engine.memory.layout.block_bytes
    with engine_of(folder, kv_disk=str(cache), kv_offloading_size=two_blocks / 2**30) as (_, core):
        found, num_loaded = all_answers(core)
        assert found == expected
        assert num_loaded == ALL_CACHED
        assert core.offload is not None
        host, disk = core.offload.tiers
        assert host.usage == 1.0
        of_host, of_disk = core.status().tiers
        assert (of_host, of_disk.tier) == (TierUsage("host", 1.0), "disk")
        assert disk.counters.num_stored_blocks >= disk.counters.num_loaded_blocks > 0


def test_kv_of_another_type_or_other_kernels_is_not_taken(checkpoint: Path, tmp_path: Path) -> None:
    """Its hashes are the same."""
    changes: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"attention_backend": "torch"}]
    for number, settings in enumerate(changes, 1):
        with engine_of(checkpoint, kv_disk=str(tmp_path), **settings) as (_, core):
            found = [answers(core, str(place), PROMPTS[place])[1] for place in (0, 1, 0)]
            assert found == [0, 0, 40]
        assert len(list(tmp_path.iterdir())) == number


def test_without_being_told_of_evictions_nothing_would_come_back(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the comparisons above are worth."""
    monkeypatch.setattr(TieredPool, "evicted", lambda self, blocks: None)
    with engine_of(checkpoint, kv_offloading_size=0.01) as (_, core):
        all_answers(core)
        assert core.offload is not None
        assert core.offload.counters.num_loaded_tokens == 0


def test_tenants_do_not_share_what_is_stored(checkpoint: Path) -> None:
    with engine_of(checkpoint, kv_offloading_size=0.01) as (_, core):
        for place, (salt, num_cached) in enumerate(((b"a", 0), (b"a", 40), (b"b", 0), (b"a", 40))):
            assert answers(core, f"a{place}", PROMPTS[0], salt)[1] == num_cached
            answers(core, f"b{place}", PROMPTS[1])


def test_a_handoff_into_blocks_that_were_evicted_leaves_what_was_stored_as_it_was(checkpoint: Path) -> None:
    with engine_of(checkpoint) as (source, plain), engine_of(checkpoint, kv_offloading_size=0.01) as (target, core):
        expected, _ = answers(plain, "plain", PROMPTS[0])
        assert answers(core, "first", PROMPTS[0])[0] == expected
        reservation = core.handoffs.reserve(key_of("handoff"), Prompt.of(PROMPTS[1]))
        assert reservation is not None
        plain.add(key_of("handoff"), Prompt.of(PROMPTS[1]), GREEDY, first_token_only=True)
        (first,) = (token for _ in range(99) if plain.has_work for output in plain.step() for token in output.token_ids)
        sent = plain.handoffs.block_table(key_of("handoff"))
        for source_id, target_id in zip(sent, reservation.missing_block_ids, strict=True):
            target.memory.blocks[target_id] = source.memory.blocks[source_id]
        core.handoffs.add_reserved(reservation, Prompt.of(PROMPTS[1]), [FirstToken(key_of("handoff"), GREEDY, first)])
        while core.has_work:
            core.step()
            core.check()
        assert answers(core, "again", PROMPTS[0]) == (expected, 40)


class Faulty:
    """A host tier in which one thing goes wrong. See `KvStore`."""

    def __init__(self, fault: str, block_bytes: int) -> None:
        self._fault = fault
        self._tier = HostTier(np.zeros((64, block_bytes), dtype=np.uint8))

    usage = 0.5

    def lookup(self, hashes: Sequence[bytes]) -> int:
        if self._fault == "cannot be asked":
            raise ConnectionRefusedError(111, "gone")
        return len(hashes) + 1 if self._fault == "promises what it does not have" else self._tier.lookup(hashes)

    def holds(self, block_hash: bytes) -> bool:
        return self._tier.holds(block_hash)

    def put(self, block: StoredBlock) -> None:
        if self._fault == "full":
            raise OSError(28, "No space left on device")
        self._tier.put(block)

    def load(self, hashes: Sequence[bytes], landing: Landing) -> None:
        if self._fault == "cannot load":
            raise TimeoutError
        if self._fault != "hangs":
            self._tier.load(hashes, _FaultyLanding(self._fault, landing))

    def forget(self, block_hash: bytes) -> None:
        self._tier.forget(block_hash)

    def close(self) -> None:
        self._tier.close()


class _FaultyLanding:
    def __init__(self, fault: str, landing: Landing) -> None:
        self._fault, self._landing, self._before = fault, landing, list[StoredBlock]()

    def arrived(self, block: StoredBlock) -> bool:
        if self._fault == "flips a bit":
            block = block._replace(content=block.content.copy())
            block.content[len(block.content) // 2] ^= 4
        elif self._fault == "mixes blocks up":
            self._before.append(block)
            block = self._before[0]._replace(block_hash=block.block_hash)
        elif self._fault == "cuts blocks":
            block = block._replace(content=block.content[:-1])
        elif self._fault == "stops" and self._before:
            return False
        self._before.append(block)
        return self._landing.arrived(block)

    def ended(self) -> None:
        self._landing.ended()

    @property
    def is_over(self) -> bool:
        return self._landing.is_over


FAULTS = {
    "cannot be asked": "failed",
    "promises what it does not have": "",
    "full": "failed",
    "cannot load": "failed",
    "hangs": "nothing for too long",
    "flips a bit": "wrong bytes",
    "mixes blocks up": "wrong bytes",
    "cuts blocks": "wrong bytes",
    "stops": "",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_store_costs_no_token_and_no_block(
    checkpoint: Path, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (load_choice, tiers) if fault == "hangs" else ():
        monkeypatch.setattr(module, "LATENCY_S", 0.05)
    monkeypatch.setattr(tiers, "REST_S", 0.0)
    with engine_of(checkpoint) as (_, core):
        expected, _ = all_answers(core)
    with engine_of(checkpoint, lambda kind: Faulty(fault, kind.block_bytes)) as (_, core):
        assert all_answers(core)[0] == expected
        assert core.status().num_held_blocks == 0
    assert FAULTS[fault] in caplog.text
    assert ("the KV store own is not asked" in caplog.text) == bool(FAULTS[fault])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kv_offloading_size": 1e-9}, "holds no block"),
        ({"kv_offloading_size": 2.0**20}, "needs as many GiB beside the KV pool, and"),
        ({"kv_offloading_size": 0.01, "enable_prefix_caching": False}, "--enable-prefix-caching"),
        ({"kv_disk": "/nowhere/at/all"}, "--kv-disk /nowhere/at/all is no folder for files: No such"),
        ({"kv_disk": "/proc/self/fdinfo"}, "--kv-disk /proc/self/fdinfo is no folder for files: "),
        ({"kv_disk_size": 1.0}, "--kv-disk-size 1 needs a folder: --kv-disk PATH"),
    ],
    ids=str,
)
def test_a_tier_that_cannot_be_is_refused_with_one_line(
    checkpoint: Path, settings: dict[str, Any], reason: str
) -> None:
    chosen = EngineSettings(model=str(checkpoint), num_threads=1, num_blocks=9, **settings)
    with pytest.raises(InvalidSetting, match=reason) as caught:
        build_engine(chosen, allocate_private)
    assert "\n" not in str(caught.value)


GRANITE = """
import numpy
from baton.engine.cache.host_tier import HostTier

def open_store(block_bytes, max_bytes):
    return HostTier(numpy.zeros((max_bytes // block_bytes or 100, block_bytes), numpy.uint8))

def open_nothing(block_bytes, max_bytes):
    return None
"""


@pytest.mark.parametrize("size", [0.0, 0.01], ids=["its own choice", "the user's limit"])
def test_the_store_of_an_installed_package_serves(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: float
) -> None:
    install(tmp_path, monkeypatch, GRANITE, {KV_STORES: "granite = open_store"})
    with engine_of(checkpoint) as (_, core):
        expected, _ = all_answers(core)
    with engine_of(checkpoint, kv_store="granite", kv_offloading_size=size) as (_, core):
        assert all_answers(core) == (expected, ALL_CACHED)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("slate", {}, "--kv-store 'slate' is not one of host, valkey, granite"),
        (
            "granite",
            {},
            "granite of the package acme is no KvStore: it has no close, forget, holds, load, lookup, put, usage",
        ),
        ("granite", {"enable_prefix_caching": False}, "--kv-store .* needs --enable-prefix-caching"),
    ],
)
def test_a_store_that_cannot_be_is_refused_with_one_line(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any], reason: str
) -> None:
    install(tmp_path, monkeypatch, GRANITE, {KV_STORES: "granite = open_nothing"})
    chosen = EngineSettings(model=str(checkpoint), num_threads=1, num_blocks=9, kv_store=name, **settings)
    with pytest.raises(InvalidSetting, match=reason) as caught:
        build_engine(chosen, allocate_private)
    assert "\n" not in str(caught.value)


def test_an_offline_model_says_what_came_from_the_tier(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), num_threads=1, block_size=8, num_blocks=9, kv_offloading_size=0.01)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    first, _, again = (llm.generate([list(PROMPTS[number])], params)[0] for number in (0, 1, 0))
    assert again.token_ids == first.token_ids
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 40)


@pytest.mark.parametrize("case", ["float32", "asynchronous device, fp8"])
def test_a_node_that_ends_as_planned_has_its_cache_back(checkpoint: Path, tmp_path: Path, case: str) -> None:
    tiers_below: dict[str, Any] = {"kv_disk": str(tmp_path), "kv_offloading_size": 0.01}
    with engine_of(checkpoint, **tiers_below, **CASES[case]) as (_, core):
        expected, _ = all_answers(core)
        core.save(lambda: 60.0)
    with engine_of(checkpoint, **tiers_below, **CASES[case]) as (engine, core):
        for number, num_cached in ((0, 40), (1, 48), (2, 48)):
            until_it_knows(engine, PROMPTS[number])
            assert answers(core, str(number), PROMPTS[number]) == (expected[number], num_cached)


def test_a_node_without_a_folder_or_without_time_saves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    with engine_of(checkpoint, kv_offloading_size=0.01) as (_, core):
        answers(core, "a", PROMPTS[0])
        core.save(lambda: 60.0)
    with engine_of(checkpoint, kv_disk=str(tmp_path)) as (_, core):
        answers(core, "a", PROMPTS[0])
        core.save(lambda: 0.0)
    assert not list(tmp_path.rglob("*.kv"))
