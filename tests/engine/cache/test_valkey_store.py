"""The shared store over a real server: a store like any, what two nodes share, and everything a server may do wrong."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from baton.engine.cache import valkey_server, valkey_store
from baton.engine.cache.store import BlockKind, KvStore, StoredBlock, TierCounters, checksum_of
from baton.engine.cache.valkey_server import ServerFault, server_at
from baton.engine.cache.valkey_store import ValkeyStore
from baton.testing.kv_stores import BLOCK_BYTES, Collected, KvStoreSuite, block_of, hash_of
from baton.wire.errors import InvalidSetting
from tests.engine.cache.tls_front import tls_front
from tests.engine.cache.valkey_servers import RunningServer, running, until
from tests.engine.scheduler.stores import Clock

CERTIFICATE = Path(__file__).parents[2] / "router/http/access/certificates/one.pem"
KINDS = count()
PATIENT = "socket_timeout=60&socket_connect_timeout=60"
HASTY = "socket_timeout=0.2&socket_connect_timeout=0.2"
SECRET = "correct-horse/battery@staple"
QUOTED = "correct-horse%2Fbattery%40staple"


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads look often whether there is something to do."""
    monkeypatch.setattr(valkey_store, "_TICK_S", 0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as started:
        yield started


@pytest.fixture
def own_server() -> Iterator[RunningServer]:
    """One that a test may harm."""
    with running() as started:
        yield started


def new_kind() -> BlockKind:
    """One that no other test has blocks of."""
    return BlockKind(BLOCK_BYTES, next(KINDS).to_bytes(16, "big"))


class Node:
    """A node's store, and what it counts."""

    def __init__(self, url: str, kind: BlockKind | None = None, clock: Callable[[], float] | None = None) -> None:
        self.kind = kind or new_kind()
        self.counters = TierCounters()
        self.store = ValkeyStore(server_at(url)(self.kind), self.counters, clock or Clock())

    def keep(self, *numbers: int) -> None:
        """Put these blocks, and wait until they are written or dropped."""
        for number in numbers:
            self.store.put(block_of(number))
        until(lambda: not self.store._pending)

    def loaded(self, *numbers: int) -> list[StoredBlock]:
        landing = Collected()
        self.store.load([hash_of(number) for number in numbers], landing)
        return landing.wait()

    def key(self, number: int) -> str:
        return f"baton:kv:1:{self.kind.digest.hex()}:{hash_of(number).hex()}"


@contextmanager
def node(
    server: RunningServer,
    kind: BlockKind | None = None,
    clock: Callable[[], float] | None = None,
    options: str = PATIENT,
) -> Iterator[Node]:
    opened = Node(f"{server.url}?{options}", kind, clock)
    try:
        yield opened
    finally:
        opened.store.close()


def until_used_again(opened: Node, clock: Clock) -> None:
    def is_used() -> bool:
        clock.now_s += 30
        return not opened.store._fault

    until(is_used)


def are(found: list[StoredBlock], *numbers: int) -> bool:
    """Whether these blocks were found, as they were put."""
    expected = [(hash_of(number), block_of(number).content.tobytes()) for number in numbers]
    return [(each.block_hash, each.content.tobytes()) for each in found] == expected


class TestValkeyStore(KvStoreSuite):
    """As every store, over what is not written yet and over the server."""

    @pytest.fixture(autouse=True)
    def at(self, server: RunningServer) -> None:
        self.url = f"{server.url}?{PATIENT}"

    def open(self) -> KvStore:
        return Node(self.url).store


def test_what_one_node_has_put_another_loads(server: RunningServer) -> None:
    with node(server) as first, node(server, first.kind) as second:
        first.keep(1, 2, 3)
        assert second.store.lookup([hash_of(1), hash_of(2), hash_of(3)]) == 3
        assert are(second.loaded(1, 2, 3), 1, 2, 3)
        assert all(each.checksum == checksum_of(each.block_hash, each.content) for each in second.loaded(1, 2, 3))


def test_blocks_of_another_kind_are_not_found(server: RunningServer) -> None:
    with node(server) as first, node(server) as second:
        first.keep(1)
        assert second.loaded(1) == []


def test_what_another_node_has_written_is_not_sent_again(own_server: RunningServer) -> None:
    with node(own_server) as first, node(own_server, first.kind) as second:
        first.keep(1, 2)
        second.keep(1, 2)
        assert own_server.count("set") == 2
        assert second.store.holds(hash_of(1))
        second.loaded(2)
        second.keep(2)
        assert own_server.count("touch") == 4


def test_a_prompt_that_nobody_has_seen_asks_once(own_server: RunningServer) -> None:
    clock = Clock()
    with node(own_server, clock=clock) as asking:
        hashes = [hash_of(1), hash_of(2)]
        assert asking.store.lookup(hashes) == 2
        assert asking.loaded(1, 2) == []
        assert asking.store.lookup(hashes) == 0
        asked = own_server.count("getrange")
        assert asking.loaded(1, 2) == []
        assert own_server.count("getrange") == asked
        clock.now_s += 6
        assert asking.store.lookup(hashes) == 2


def test_what_is_known_is_bounded(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey_store, "_MAX_KNOWN", 3)
    with node(server) as asking:
        for number in range(6):
            asking.loaded(number)
        assert [asking.store.lookup([hash_of(number)]) for number in range(6)] == [1, 1, 1, 0, 0, 0]


def test_a_short_load_does_not_wait_for_the_end_of_a_long_one(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey_store, "_BATCH_BYTES", 2 * BLOCK_BYTES)
    order: list[int] = []

    class Noting(Collected):
        def arrived(self, block: StoredBlock) -> bool:
            if not order:
                assert both_asked.wait(10.0)
            order.append(block.block_hash[1])
            return super().arrived(block)

    with node(server) as first, node(server, first.kind) as second:
        first.keep(*range(12))
        both_asked = threading.Event()
        long, short = Noting(), Noting()
        second.store.load([hash_of(number) for number in range(2, 12)], long)
        second.store.load([hash_of(0), hash_of(1)], short)
        both_asked.set()
        assert are(long.wait(), *range(2, 12))
        assert are(short.wait(), 0, 1)
    assert order[:4] == [2, 3, 0, 1]


def test_a_load_begins_with_few_blocks_and_takes_more_each_time(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey_store, "_FIRST_BYTES", 2 * BLOCK_BYTES)
    asked: list[int] = []

    class Noting(Collected):
        def arrived(self, block: StoredBlock) -> bool:
            asked.append(own_server.count("getrange"))
            return super().arrived(block)

    with node(own_server) as first, node(own_server, first.kind) as second:
        first.keep(*range(16))
        landing = Noting()
        second.store.load([hash_of(number) for number in range(16)], landing)
        assert are(landing.wait(), *range(16))
    assert list(dict.fromkeys(asked)) == [2, 6, 14, 16]


def test_what_the_server_takes_too_slowly_is_dropped_and_counted(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey_store, "_PENDING_BYTES", 3 * BLOCK_BYTES)
    with node(own_server) as first:
        own_server.freeze()
        for number in range(10):
            first.store.put(block_of(number))
        assert first.counters.num_dropped_blocks == 7
        assert are(first.loaded(0, 1, 2), 0, 1, 2)
        own_server.thaw()
        until(lambda: not first.store._pending)
        first.keep(9)
        assert are(first.loaded(0, 1, 2), 0, 1, 2)


def damaged_values() -> dict[str, Callable[[RunningServer, str], object]]:
    """What somebody may do to the value of a key."""

    def header(change: Callable[[bytes], bytes]) -> Callable[[RunningServer, str], object]:
        return lambda server, key: server.client.set(key, change(server.client.get(key)))

    return {
        "cut": header(lambda value: value[:-1]),
        "longer": header(lambda value: value + b"x"),
        "only a header": header(lambda value: value[:20]),
        "another version": header(lambda value: b"BKV9" + value[4:]),
        "another length inside": header(lambda value: value[:4] + bytes(8) + value[12:]),
        "nothing that Baton wrote": header(lambda value: b"x" * len(value)),
        "a list": lambda server, key: (server.client.delete(key), server.client.rpush(key, "x")),
        "64 MiB": lambda server, key: server.client.setrange(key, 2**26, "x"),
    }


@pytest.mark.parametrize("damage", damaged_values())
def test_a_value_that_is_no_block_is_not_given_and_gives_way(server: RunningServer, damage: str) -> None:
    with node(server) as first, node(server, first.kind) as second:
        first.keep(1, 2, 3)
        damaged_values()[damage](server, first.key(2))
        sent = server.client.info("stats")["total_net_output_bytes"]
        assert are(second.loaded(1, 2, 3), 1)
        assert server.client.info("stats")["total_net_output_bytes"] - sent < 2**16
        assert second.counters.num_damaged_blocks == 1
        second.keep(2)
        assert are(second.loaded(1, 2, 3), 1, 2, 3)
    with node(server, first.kind) as third:
        assert are(third.loaded(1, 2, 3), 1, 2, 3)


def test_a_block_with_wrong_bytes_keeps_its_checksum_and_is_replaced_when_it_was_forgotten(
    server: RunningServer,
) -> None:
    with node(server) as first, node(server, first.kind) as second:
        first.keep(1)
        server.client.setrange(first.key(1), 500, b"flipped")
        (found,) = second.loaded(1)
        assert found.checksum == block_of(1).checksum != checksum_of(found.block_hash, found.content)
        second.store.forget(hash_of(1))
        assert (second.store.lookup([hash_of(1)]), second.loaded(1)) == (0, [])
        second.keep(1)
        assert are(first.loaded(1), 1)


def test_a_server_that_died_fails_calls_at_once_and_is_used_again_when_it_is_back_and_empty(
    own_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with node(own_server, clock=(clock := Clock())) as first:
        first.keep(1)
        own_server.kill()
        assert first.loaded(1) == []
        for call in (lambda: first.store.lookup([hash_of(1)]), lambda: first.store.put(block_of(2))):
            with pytest.raises(ServerFault, match=f"redis://{own_server.address}: ConnectionError"):
                call()
        own_server.start()
        until_used_again(first, clock)
        assert first.loaded(1) == []
        first.keep(2)
        assert are(first.loaded(2), 2)
    assert caplog.text.count("is not used until it can be reached: ConnectionError") == 1


def test_who_has_nothing_to_write_waits(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks, look = count(), ValkeyStore._next_jobs

    def counted(store: ValkeyStore) -> list[bytes]:
        next(num_looks)
        return look(store)

    monkeypatch.setattr(valkey_store, "_TICK_S", 10.0)
    monkeypatch.setattr(ValkeyStore, "_next_jobs", counted)
    with node(server):
        time.sleep(0.05)
        assert next(num_looks) <= 2


def test_trials_become_rarer(own_server: RunningServer) -> None:
    clock = Clock()
    own_server.kill()
    with node(own_server, clock=clock) as first:
        assert first.loaded(1) == []
        pauses = []
        for _ in range(8):
            until(lambda: first.store._tries_at_s > clock.now_s)
            pauses.append(first.store._tries_at_s - clock.now_s)
            clock.now_s = first.store._tries_at_s
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_server_that_hangs_holds_up_no_call_and_ends_loads(own_server: RunningServer) -> None:
    with node(own_server, clock=(clock := Clock()), options=HASTY) as first:
        first.keep(1, 2)
        own_server.freeze()
        landings = [Collected() for _ in range(5)]
        for landing in landings:
            first.store.load([hash_of(1), hash_of(2)], landing)
        assert [landing.wait() for landing in landings] == [[]] * 5
        with pytest.raises(ServerFault, match="TimeoutError"):
            first.store.lookup([hash_of(1)])
        own_server.thaw()
        until_used_again(first, clock)
        assert are(first.loaded(1, 2), 1, 2)


def test_a_full_server_gives_what_it_has_and_what_it_refuses_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running() as full, node(full, clock=(clock := Clock())) as first:
        first.keep(1)
        full.client.config_set("maxmemory", "1kb")
        first.keep(2)
        assert first.counters.num_dropped_blocks == 1
        first.store.put(block_of(3))
        assert first.counters.num_dropped_blocks == 2
        assert are(first.loaded(1), 1)
        assert first.loaded(2) == []
        clock.now_s += 6
        first.keep(4)  # which is not said again
        full.client.config_set("maxmemory", "1gb")
        clock.now_s += 6
        first.keep(2)
        assert are(first.loaded(2), 2)
    assert caplog.text.count("keeps nothing for 5 s: OutOfMemoryError") == 1
    assert caplog.messages[-1].endswith("works again")


RIGHTS = "~baton:kv:* +getrange +touch +set +unlink +select"


def test_a_server_with_passwords_lets_in_who_has_the_rights_that_the_docs_name() -> None:
    with running("--requirepass", SECRET) as guarded:
        guarded.client = type(guarded.client)(port=guarded.port, password=SECRET)
        guarded.client.execute_command("ACL", "SETUSER", "baton", "on", f">{SECRET}", *RIGHTS.split())
        for user in ("", "baton"):
            guarded.url = f"redis://{user}:{QUOTED}@{guarded.address}/1"
            with node(guarded) as first:
                first.keep(1)
                assert are(first.loaded(1), 1)
                first.store.forget(hash_of(1))
                first.keep(1)
                assert first.counters == TierCounters()


@pytest.mark.parametrize(
    ("options", "login", "reason"),
    [
        (("--requirepass", SECRET), "", "AuthenticationError"),
        (("--requirepass", SECRET), f":wrong-{QUOTED}@", "AuthenticationError"),
        (("--user", "default", "on", "nopass", "+@all", "-getrange", "~*"), "", "NoPermissionError"),
        (("--rename-command", "AUTH", "NOTHING"), f":{QUOTED}@", "ResponseError"),
    ],
    ids=["no password", "wrong password", "no rights", "an error that repeats the password"],
)
def test_who_is_not_let_in_is_told_why_without_the_password(
    options: tuple[str, ...], login: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running(*options) as guarded:
        guarded.url = f"redis://{login}{guarded.address}/0"
        with node(guarded) as first:
            assert first.loaded(1) == []
            with pytest.raises(ServerFault, match=reason) as caught:
                first.store.lookup([hash_of(1)])
    for text in (str(caught.value), caplog.text):
        assert reason in text
        assert "horse" not in text


@pytest.mark.parametrize(
    ("said", "told"), [("NOAUTH log in first", "ServerFault NOAUTH"), ("unknown command 'HORSE", "ServerFault")]
)
def test_of_what_a_server_says_a_leading_code_is_told(said: str, told: str) -> None:
    assert valkey_server._reason(ServerFault(said)) == told


def test_tls_needs_a_certificate_that_is_trusted_and_that_names_the_host(server: RunningServer) -> None:
    with tls_front(server.port, CERTIFICATE) as port:
        trusting = f"{PATIENT}&ssl_ca_certs={CERTIFICATE}"
        first = Node(f"rediss://127.0.0.1:{port}/0?{trusting}")
        first.keep(1)
        assert are(first.loaded(1), 1)
        for host, options in (("127.0.0.1", PATIENT), ("localhost", trusting)):
            refusing = Node(f"rediss://{host}:{port}/0?{options}", first.kind)
            assert refusing.loaded(1) == []
            with pytest.raises(ServerFault, match=f"rediss://{host}:{port}: ConnectionError"):
                refusing.store.lookup([hash_of(1)])
            refusing.store.close()
        first.store.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:6379",
        "http://127.0.0.1:6379/0",
        f"redis://:{SECRET}@127.0.0.1:6379/0",
        f"redis://:{QUOTED}@127.0.0.1:horse/0",
        f"redis://:{QUOTED}@127.0.0.1/0?socket_timeout=horse",
        f"redis://:{QUOTED}@127.0.0.1/0?horse=1",
    ],
)
def test_an_address_that_cannot_be_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(InvalidSetting, match="--kv-store-url is no address") as caught:
        server_at(url)
    assert "horse" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_answer_has_half_a_second_unless_the_address_says_otherwise() -> None:
    for query, timeout_s in (("", 0.5), ("?socket_timeout=2", 2.0)):
        server = server_at(f"redis://127.0.0.1:6379/0{query}")(new_kind())
        assert server._client.connection_pool.connection_kwargs["socket_timeout"] == timeout_s


def test_without_its_package_it_is_refused_with_the_name_of_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(InvalidSetting, match=r"pip install 'baton-serve\[valkey\]'"):
        server_at("redis://127.0.0.1:6379/0")


def test_at_the_end_no_thread_is_left_however_the_server_is(own_server: RunningServer) -> None:
    with node(own_server, options=HASTY) as first:
        own_server.freeze()
        first.store.put(block_of(1))
        landing = Collected()
        first.store.load([hash_of(2)], landing)
    assert landing.wait() == []
    assert not any(thread.is_alive() for thread in first.store._threads)
