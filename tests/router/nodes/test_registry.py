"""Which nodes may join, which are alive, and what each is expected to have cached."""

from __future__ import annotations

from dataclasses import replace

import pytest

import baton.router.nodes.registry
from baton.router.nodes.registry import DEAD_AFTER_S, NodeRegistry
from baton.wire.errors import Refused
from baton.wire.messages.membership import BOTH, DECODE, PREFILL, Heartbeat, Hello
from baton.wire.messages.prefixes import CacheEvents
from tests.router.fake_node import FINGERPRINT, LAYOUT, STATUS, make_hello

MODEL, OTHER = "org/tiny", "org/other"
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


@pytest.fixture
def registry() -> NodeRegistry:
    return NodeRegistry({MODEL: None})


def _join(registry: NodeRegistry, role: str = DECODE, now_s: float = 0.0, **changes: object) -> Hello:
    hello = make_hello(role, **changes)
    assert registry.register(hello, now_s) is None
    return hello


def test_a_node_is_available_for_its_role_only(registry: NodeRegistry) -> None:
    hello = _join(registry, PREFILL)
    assert [node.epoch for node in registry.available(PREFILL, MODEL)] == [hello.epoch]
    assert registry.available(DECODE, MODEL) == []
    assert len(registry) == 1


def test_a_mixed_node_is_available_for_what_it_prefers(registry: NodeRegistry) -> None:
    first, second = _join(registry, prefers=PREFILL), _join(registry, prefers=DECODE)

    def available() -> list[list[int]]:
        return [[node.epoch for node in registry.available(role, MODEL)] for role in (PREFILL, DECODE)]

    assert available() == [[first.epoch], [second.epoch]]
    registry.prefer(first.epoch, BOTH)
    assert available() == [[first.epoch], [first.epoch, second.epoch]]
    registry.prefer(first.epoch, DECODE)
    assert available() == [[], [first.epoch, second.epoch]]


def test_somebody_decodes_although_nobody_prefers_to(registry: NodeRegistry) -> None:
    first, second = _join(registry, prefers=PREFILL), _join(registry, prefers=PREFILL)
    assert [node.epoch for node in registry.available(DECODE, MODEL)] == [first.epoch, second.epoch]
    assert [node.epoch for node in registry.available(DECODE, MODEL, {first.epoch})] == [second.epoch]


def test_only_a_decode_node_may_prefer_anything(registry: NodeRegistry) -> None:
    for hello in (make_hello(PREFILL, prefers=DECODE), make_hello(DECODE, prefers="idling")):
        with pytest.raises(Refused, match="not known here"):
            registry.register(hello, 0.0)


def test_the_largest_decode_node_limits_requests(registry: NodeRegistry) -> None:
    assert registry.max_request_tokens(MODEL) is None
    _join(registry, PREFILL, max_request_tokens=200)
    assert registry.max_request_tokens(MODEL) == 200
    _join(registry, max_request_tokens=150)
    _join(registry, max_request_tokens=100)
    assert registry.max_request_tokens(MODEL) == 150


def test_another_tokenizer_is_refused_with_both_digests() -> None:
    registry = NodeRegistry({MODEL: None}, {MODEL: "aaaa"})
    _join(registry, tokenizer="aaaa")
    _join(registry, PREFILL, tokenizer="")  # its checkpoint has none, so it cannot disagree
    with pytest.raises(Refused, match="tokenizer differs: aaaa here, bbbb at stranger"):
        registry.register(make_hello(PREFILL, node_id="stranger", tokenizer="bbbb"), 0.0)
    assert len(registry) == 2


def test_another_model_is_refused_with_both_fingerprints(registry: NodeRegistry) -> None:
    _join(registry)
    with pytest.raises(Refused, match=rf"{FINGERPRINT} \({MODEL}\) here, 1234 at stranger"):
        registry.register(make_hello(PREFILL, node_id="stranger", fingerprint="1234"), 0.0)
    assert len(registry) == 1


def test_the_routers_own_checkpoint_decides_for_the_first_node() -> None:
    registry = NodeRegistry({MODEL: "own"})
    with pytest.raises(Refused, match=rf"own \({MODEL}\) here, {FINGERPRINT} at first"):
        registry.register(make_hello(DECODE, node_id="first"), 0.0)


def test_another_layout_is_refused_with_both_values(registry: NodeRegistry) -> None:
    _join(registry)
    with pytest.raises(Refused, match="block_size is 4 here and 32 at stranger"):
        registry.register(make_hello(PREFILL, node_id="stranger", layout=replace(LAYOUT, block_size=32)), 0.0)


def test_nodes_belong_to_the_model_of_their_fingerprint() -> None:
    registry = NodeRegistry({MODEL: FINGERPRINT, OTHER: "1234"})
    one = _join(registry, max_request_tokens=300)
    other = _join(registry, fingerprint="1234", layout=replace(LAYOUT, block_size=32), max_request_tokens=200)
    assert [node.epoch for node in registry.available(DECODE, MODEL)] == [one.epoch]
    assert [node.epoch for node in registry.available(DECODE, OTHER)] == [other.epoch]
    assert (registry.max_request_tokens(MODEL), registry.max_request_tokens(OTHER)) == (300, 200)
    with pytest.raises(Refused, match="5678 at stranger"):
        registry.register(make_hello(PREFILL, node_id="stranger", fingerprint="5678"), 0.0)


def test_a_model_without_weights_here_is_that_of_nodes_that_fit_no_other() -> None:
    registry = NodeRegistry({MODEL: FINGERPRINT, OTHER: None})
    other = _join(registry, fingerprint="1234")
    assert [node.epoch for node in registry.of_model(OTHER)] == [other.epoch]
    with pytest.raises(Refused, match="5678 at stranger"):
        registry.register(make_hello(PREFILL, node_id="stranger", fingerprint="5678"), 0.0)


def test_a_node_may_come_back_with_another_served_model() -> None:
    registry = NodeRegistry({MODEL: FINGERPRINT, OTHER: "1234"})
    _join(registry, node_id="d")
    assert registry.register(make_hello(DECODE, node_id="d", fingerprint="1234"), 0.0) is not None
    assert (registry.available(DECODE, MODEL), len(registry.available(DECODE, OTHER))) == ([], 1)


def test_an_unknown_role_is_refused(registry: NodeRegistry) -> None:
    with pytest.raises(Refused, match="role 'spectator'"):
        registry.register(make_hello("spectator"), 0.0)


def test_the_only_node_may_come_back_with_another_model(registry: NodeRegistry) -> None:
    _join(registry, node_id="d")
    assert registry.register(make_hello(DECODE, node_id="d", fingerprint="new"), 0.0) is not None


def test_a_new_life_replaces_the_earlier_one(registry: NodeRegistry) -> None:
    first = _join(registry, node_id="d")
    second = make_hello(DECODE, node_id="d")
    earlier = registry.register(second, 1.0)
    assert earlier is not None
    assert earlier.epoch == first.epoch
    assert [node.epoch for node in registry.all()] == [second.epoch]
    assert registry.get(first.epoch) is None


def test_the_same_life_may_say_hello_again(registry: NodeRegistry) -> None:
    hello = _join(registry, now_s=0.0)
    node = registry.get(hello.epoch)
    assert node is not None
    node.num_legs = 3
    assert registry.register(hello, 5.0) is None
    assert registry.get(hello.epoch) is node
    assert (node.load, node.heard_s) == (3, 5.0)


def test_a_node_without_heartbeat_is_overdue(registry: NodeRegistry) -> None:
    silent, beating = _join(registry), _join(registry)
    busy = replace(STATUS, num_running=5)
    assert registry.heartbeat(Heartbeat(beating.epoch, busy), DEAD_AFTER_S)
    assert registry.overdue(DEAD_AFTER_S) == []
    assert [node.epoch for node in registry.overdue(DEAD_AFTER_S + 0.1)] == [silent.epoch]
    assert [node.status for node in registry.all()] == [STATUS, busy]


def test_what_is_said_of_all_nodes_follows_each_that_joins_or_goes(registry: NodeRegistry) -> None:
    def said() -> tuple[int, int | None, int, int | None, int]:
        return (
            len(registry.available(DECODE, MODEL)),
            registry.max_request_tokens(MODEL),
            registry.fewest_request_tokens(MODEL),
            registry.max_num_seqs(MODEL),
            registry.num_decoded_together,
        )

    assert said() == (0, None, 0, None, 0)
    _join(registry, PREFILL, max_request_tokens=300, max_num_seqs=3)
    assert said() == (0, 300, 300, 3, 0)
    first = _join(registry, max_request_tokens=100, max_num_seqs=8)
    assert said() == (1, 100, 100, 3, 8)
    second = _join(registry, max_request_tokens=200, max_num_seqs=2)
    assert said() == (2, 200, 100, 2, 10)
    registry.leave(first.epoch)
    assert said() == (1, 200, 100, 2, 2)
    registry.remove(second.epoch)
    assert said() == (0, 100, 100, 3, 0)


def test_the_heartbeat_of_a_stranger_is_told_apart(registry: NodeRegistry) -> None:
    assert not registry.heartbeat(Heartbeat(123, STATUS), 0.0)


def test_a_leaving_node_gets_nothing_more_but_stays_known(registry: NodeRegistry) -> None:
    leaving, staying = _join(registry), _join(registry)
    registry.leave(leaving.epoch)
    assert [node.epoch for node in registry.available(DECODE, MODEL)] == [staying.epoch]
    assert len(registry) == 2
    assert registry.available(DECODE, MODEL, frozenset([staying.epoch]))  # rather an avoided node than one that leaves


def test_avoided_nodes_are_used_only_when_there_is_no_other(registry: NodeRegistry) -> None:
    first, second = _join(registry), _join(registry)
    assert [node.epoch for node in registry.available(DECODE, MODEL, frozenset([first.epoch]))] == [second.epoch]
    assert len(registry.available(DECODE, MODEL, frozenset([first.epoch, second.epoch]))) == 2


def test_a_removed_node_is_forgotten(registry: NodeRegistry) -> None:
    hello = _join(registry)
    assert registry.remove(hello.epoch) is not None
    assert registry.remove(hello.epoch) is None
    assert len(registry) == 0


def _cached(registry: NodeRegistry, hello: Hello) -> set[bytes]:
    node = registry.get(hello.epoch)
    assert node is not None
    return node.cached_hashes


def test_cache_events_add_and_remove(registry: NodeRegistry) -> None:
    hello = _join(registry)
    registry.cache_events(CacheEvents(hello.epoch, False, A + B, b""))
    registry.cache_events(CacheEvents(hello.epoch, False, C, A))
    assert _cached(registry, hello) == {B, C}


def test_a_snapshot_forgets_what_was_known(registry: NodeRegistry) -> None:
    hello = _join(registry)
    registry.cache_events(CacheEvents(hello.epoch, False, A + B, b""))
    registry.cache_events(CacheEvents(hello.epoch, True, C, b""))
    assert _cached(registry, hello) == {C}


def test_a_node_that_comes_back_in_the_same_life_still_has_what_it_had(registry: NodeRegistry) -> None:
    hello, other = _join(registry), _join(registry, node_id="other")
    registry.cache_events(CacheEvents(hello.epoch, False, A + B, b""))
    registry.remove(hello.epoch)
    registry.register(hello, 1.0)
    assert (_cached(registry, hello), _cached(registry, other)) == ({A, B}, set())
    registry.cache_events(CacheEvents(hello.epoch, True, C, b""))
    assert _cached(registry, hello) == {C}


def test_what_few_lost_nodes_have_is_remembered(registry: NodeRegistry) -> None:
    hellos = [_join(registry, node_id=f"node-{number}") for number in range(100)]
    for hello in hellos:
        registry.cache_events(CacheEvents(hello.epoch, False, A, b""))
        registry.remove(hello.epoch)
    for hello in hellos:
        registry.register(hello, 1.0)
    assert [bool(_cached(registry, hello)) for hello in hellos] == [False] * 84 + [True] * 16


def test_half_a_hash_and_strangers_are_ignored(registry: NodeRegistry) -> None:
    hello = _join(registry)
    registry.cache_events(CacheEvents(hello.epoch, False, A + b"half", b"x"))
    registry.cache_events(CacheEvents(hello.epoch + 1, False, B, b""))
    assert _cached(registry, hello) == {A}


def test_known_hashes_are_bounded(registry: NodeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.router.nodes.registry, "MAX_KNOWN_HASHES", 2)
    hello = _join(registry)
    for number in range(100):
        registry.cache_events(CacheEvents(hello.epoch, False, number.to_bytes(16, "big"), b""))
        assert len(_cached(registry, hello)) <= 2


def test_nodes_of_one_model_agree_on_what_it_computes_and_stores() -> None:
    registry = NodeRegistry({"m": "abcd"})
    _join(registry, fingerprint="abcd+int8")
    with pytest.raises(Refused, match="quantization differs: int8 here, none at plain"):
        registry.register(make_hello(PREFILL, node_id="plain", fingerprint="abcd"), 0.0)
    with pytest.raises(Refused, match="quantization differs: int8 here, int4 at other"):
        registry.register(make_hello(PREFILL, node_id="other", fingerprint="abcd+int4"), 0.0)
    with pytest.raises(
        Refused, match=r"KV cache differs: the model's dtype here, fp8_e4m3 at codes .*--kv-cache-dtype"
    ):
        registry.register(make_hello(PREFILL, node_id="codes", fingerprint="abcd+int8+kv-fp8_e4m3"), 0.0)
    with pytest.raises(Refused, match=r"activations differ: not rounded here, int8 at rounds .*--activation-dtype"):
        registry.register(make_hello(PREFILL, node_id="rounds", fingerprint="abcd+int8+x-int8"), 0.0)
    with pytest.raises(Refused, match=r"draft model differs: none here, 12ab34cd at guesses .*--speculative-config"):
        registry.register(make_hello(PREFILL, node_id="guesses", fingerprint="abcd+int8+draft-12ab34cd"), 0.0)
