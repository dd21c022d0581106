"""The router's end of the control connections: which nodes may join, which messages are dropped, which nodes are
lost."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import xxhash
import zmq

import baton.router.nodes.registry
from baton.router.nodes.bad_peers import MAX_BAD_MESSAGES
from baton.router.nodes.control import ControlLink, ControlPort
from baton.router.nodes.registry import NodeRegistry
from baton.wire import links
from baton.wire.codec import PROTOCOL_VERSION
from baton.wire.errors import InvalidSetting
from baton.wire.layout import KvLayout, LayerKv
from baton.wire.messages.legs import Cancel, Decode
from baton.wire.messages.membership import DECODE, PREFILL, Heartbeat, Introduce, Refusal, Welcome
from baton.wire.messages.output import TokenEvent, Tokens
from baton.wire.messages.vocabulary import NODE_TO_ROUTER
from tests.router.fake_node import PATIENCE_S, STATUS, FakeNode, answering, make_hello
from tests.router.rig import MODEL, relaying

OTHER_LAYOUT = KvLayout.of_layers("float32", 4, [LayerKv(num_kv_heads=2, head_dim=99)] * 2)


async def _until(holds: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _envelope(body: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    return struct.pack("<2sHIQ", b"BT", version, len(body), xxhash.xxh3_64_intdigest(body)) + body


async def test_a_node_is_welcomed_and_pinged() -> None:
    async with relaying() as rig:
        node = rig.dial(DECODE)
        assert await node.expect(Welcome) == Welcome(rig.member(node).session.number, rig.registry.epoch)
        await _until(lambda: node.num_pings >= 2)


async def test_what_else_is_due_comes_between_the_tokens_of_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    num_turns = 0

    async with relaying() as rig:

        async def count() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                rig.control.send(node.hello.epoch, Cancel(b"h" * 16, 1))
                await asyncio.sleep(0)

        monkeypatch.setattr(type(rig.relay), "on_tokens", lambda _, tokens: turns.append(num_turns))
        node = await rig.join(DECODE)
        other = asyncio.create_task(count())
        for _ in range(8):
            events = [TokenEvent(secrets.token_bytes(16), 1, 0, (5,), (), "", 0) for _ in range(256)]
            node.send(Tokens(node.hello.epoch, tuple(events)))
        time.sleep(0.3)  # noqa: ASYNC251  all of them have come before the loop looks
        await _until(lambda: len(turns) == 8, within_s=10.0)
        other.cancel()
    assert len(set(turns)) == 8


async def test_a_node_that_does_not_fit_is_told_why() -> None:
    async with relaying() as rig:
        await rig.join(DECODE)
        stranger = rig.dial(PREFILL, layout=OTHER_LAYOUT)
        assert "head_dim of layer 0 is 16 here and 99" in (await stranger.expect(Refusal)).message
        assert len(rig.registry) == 1


async def test_after_a_restart_of_the_router_most_nodes_decide_and_not_the_first() -> None:
    async with relaying() as rig:
        odd = await rig.join(DECODE, layout=OTHER_LAYOUT, session=2**40)
        first = rig.dial(PREFILL, session=2**40)
        await first.expect(Refusal)
        second = rig.dial(DECODE, session=2**40)
        await second.join()
        assert "KV layout" in (await odd.expect(Refusal)).message
        await first.join()  # asked again because it is unknown
        joined = {node.epoch for node in rig.registry.all()}
        assert joined == {first.hello.epoch, second.hello.epoch}


async def test_new_nodes_with_another_layout_do_not_outvote_those_that_serve() -> None:
    async with relaying() as rig:
        good = await rig.join(DECODE)
        for _ in range(3):
            stranger = rig.dial(DECODE, layout=OTHER_LAYOUT)
            await stranger.expect(Refusal)
            stranger.die()
        assert [node.epoch for node in rig.registry.all()] == [good.hello.epoch]


async def test_a_joined_node_whose_message_names_another_version_is_not_refused_for_it() -> None:
    async with relaying() as rig:
        node = await rig.join(DECODE)
        node.send_raw(_envelope(b"a bit of it has changed", version=77))
        await rig.has_heard(node)
        assert not node.has(Refusal)
        assert rig.control.num_rejected_messages == 1


async def test_a_node_with_another_protocol_version_is_told_both() -> None:
    async with relaying() as rig:
        await rig.join(DECODE)
        node = rig.dial(DECODE, layout=OTHER_LAYOUT)
        await node.expect(Refusal)
        node.send_raw(_envelope(b"from the future", version=77))
        message = (await node.expect(Refusal)).message
        assert "77" in message
        assert str(PROTOCOL_VERSION) in message


async def test_a_node_must_use_its_epoch_as_identity() -> None:
    async with relaying() as rig:
        node = await rig.join(DECODE)
        node.send(make_hello(PREFILL))
        assert "identity" in (await node.expect(Refusal)).message
        assert len(rig.registry) == 1


async def test_bad_frames_are_counted_and_affect_no_other_node() -> None:
    async with relaying() as rig:
        node = await rig.join(DECODE, answering([1, 2, 3]))
        hello = NODE_TO_ROUTER.encode(node.hello)
        flipped = hello[:40] + bytes([hello[40] ^ 1]) + hello[41:]
        bodies = [b"", b"\xc1", b"\x80", b"\x90" * 9, b"\x81\xa1t\xa4Exec"]
        bad = [b"", b"x", secrets.token_bytes(300), hello[:-1], hello + b"x", flipped, *map(_envelope, bodies)]
        for frame in bad:
            node.send_raw(frame)
        assert await rig.call().result() == [1, 2, 3]
        assert rig.control.num_rejected_messages == len(bad)
        assert not node.has(Refusal)


async def test_a_node_speaks_for_itself_only() -> None:
    async with relaying() as rig:
        honest, liar = await rig.join(DECODE), await rig.join(DECODE)
        call = rig.call()
        leg = await honest.expect(Decode)
        liar.send(Tokens(honest.hello.epoch, ()))
        await _until(lambda: rig.control.num_rejected_messages == 1)
        honest.emit(leg, [5], finish="stop")
        assert await call.result() == [5]


async def test_connections_that_are_no_node_get_nothing() -> None:
    async with relaying() as rig:
        other = rig.context.socket(zmq.DEALER)
        try:
            other.connect(rig.control.address)
            await asyncio.to_thread(other.send, b"GET / HTTP/1.1")
            await _until(lambda: rig.control.num_rejected_messages == 1)
            assert len(rig.registry) == 0
        finally:
            other.close(0)


async def test_a_stranger_that_sends_rubbish_is_logged_once_and_not_listened_to(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with relaying() as rig:
        node = await rig.join(DECODE, answering([1]))
        other = rig.context.socket(zmq.DEALER)
        try:
            other.connect(rig.control.address)
            for _ in range(3 * MAX_BAD_MESSAGES):
                await asyncio.to_thread(other.send, b"rubbish")
            await asyncio.to_thread(other.send, NODE_TO_ROUTER.encode(Heartbeat(node.hello.epoch, STATUS)))
            await _until(lambda: rig.control.num_rejected_messages == MAX_BAD_MESSAGES)
            await rig.has_heard(node)
            assert await rig.call().result() == [1]
            assert rig.control.num_rejected_messages == MAX_BAD_MESSAGES
            assert sum("rejected" in record.message for record in caplog.records) == 1
        finally:
            other.close(0)


async def test_a_stranger_is_not_heard_out() -> None:
    async with relaying() as rig:
        other = rig.context.socket(zmq.DEALER)
        try:
            other.connect(rig.control.address)
            events = tuple(TokenEvent(bytes(16), 1, 0, (), (), "", 0) for _ in range(2000))
            await asyncio.to_thread(other.send, NODE_TO_ROUTER.encode(Tokens(1, events)))
            await _until(lambda: rig.control.num_rejected_messages == 1)
        finally:
            other.close(0)


async def test_a_node_that_sends_nothing_but_rubbish_is_lost() -> None:
    async with relaying() as rig:
        node = await rig.join(DECODE)
        for _ in range(MAX_BAD_MESSAGES):
            node.send_raw(b"rubbish")
        await rig.loses(DECODE)


async def test_a_node_that_floods_the_router_with_what_is_right_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.router.nodes.bad_peers.MAX_MESSAGES", 50.0)
    async with relaying() as rig:
        flooding, good = await rig.join(DECODE), await rig.join(DECODE, answering([1, 2]))
        for _ in range(600):
            flooding.report_cache()
        await rig.loses_all_but(DECODE, 1)
        assert rig.registry.get(good.hello.epoch) is not None
        assert await rig.call().result() == [1, 2]


async def test_work_of_an_unknown_node_is_answered_by_introduce() -> None:
    async with relaying() as rig:
        node = await rig.join(DECODE)
        node.is_beating = False
        rig.registry.remove(node.hello.epoch)
        node.send(Tokens(node.hello.epoch, ()))
        await node.expect(Introduce)
        await node.join()
        assert len(rig.registry) == 1


async def test_a_heartbeat_on_its_own_connection_counts_for_its_node() -> None:
    async with relaying() as rig:
        node = await rig.join(DECODE)
        node.is_beating = False
        beat = links.open_socket(rig.context, zmq.DEALER, links.LinkSettings())
        try:
            links.connect(beat, rig.control.address, links.LinkSettings())
            message = NODE_TO_ROUTER.encode(Heartbeat(node.hello.epoch, replace(STATUS, num_running=9)))
            await asyncio.to_thread(beat.send, message)
            await _until(lambda: rig.member(node).status.num_running == 9)
            rig.registry.remove(node.hello.epoch)
            await asyncio.to_thread(beat.send, message)
            await node.expect(Introduce)
        finally:
            beat.close(0)


async def test_a_node_finds_a_router_that_was_restarted() -> None:
    async with relaying() as rig:
        port = int(rig.control.address.rpartition(":")[2])
        node = await rig.join(DECODE, answering([1, 2]))
        await rig.control.close()
        await _until(lambda: _is_free(port))
        async with relaying(port=port) as second:
            await node.expect(Introduce)
            assert await node.expect(Welcome) == Welcome(second.member(node).session.number, second.registry.epoch)
            assert await second.call().result() == [1, 2]


async def test_a_connection_that_breaks_is_noticed_before_a_heartbeat_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(baton.router.nodes.registry, "DEAD_AFTER_S", 1000.0)
    async with relaying() as rig:
        node = await rig.join(DECODE)
        node.die()
        await rig.loses(DECODE)


async def test_a_silent_node_is_lost_and_its_work_done_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.router.nodes.registry, "DEAD_AFTER_S", 0.6)
    async with relaying() as rig:
        frozen = await rig.join(DECODE)
        call = rig.call()
        await frozen.expect(Decode)
        await rig.join(DECODE, answering([1, 2]))
        frozen.is_beating = False
        assert await call.result() == [1, 2]
        assert rig.registry.get(frozen.hello.epoch) is None
        frozen.is_beating = True  # it was only slow: it may come back, and begins anew
        await frozen.join()
        assert not frozen.live
        assert len(rig.registry) == 2
        await rig.settle()


async def test_a_node_that_restarts_fails_its_earlier_work() -> None:
    async with relaying() as rig:
        node = await rig.join(DECODE, node_id="d")
        call = rig.call()
        await node.expect(Decode)
        node.die()
        reborn = await rig.join(DECODE, answering([1]), node_id="d")
        assert await call.result() == [1]
        assert (await reborn.expect(Decode)).attempt == 2
        assert len(rig.registry) == 1
        await rig.settle()


async def test_of_two_living_nodes_with_one_name_the_later_is_refused() -> None:
    async with relaying() as rig:
        node = await rig.join(DECODE, node_id="d", http_address="http://first")
        call = rig.call()
        leg = await node.expect(Decode)
        other = rig.dial(DECODE, node_id="d")
        assert "called d is alive at http://first" in (await other.expect(Refusal)).message
        node.emit(leg, [1], finish="stop")
        assert await call.result() == [1]
        assert rig.relay.counters.num_retries == 0


async def test_a_name_is_free_again_when_its_node_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.router.nodes.registry, "DEAD_AFTER_S", 0.6)
    async with relaying() as rig:
        frozen = await rig.join(DECODE, node_id="d")
        frozen.is_beating = False
        await rig.has_heard(frozen)
        successor = await rig.join(DECODE, node_id="d")
        assert [node.epoch for node in rig.registry.all()] == [successor.hello.epoch]


async def test_many_messages_at_once_are_all_read() -> None:
    async with relaying() as rig:
        node = await rig.join(DECODE)
        call = rig.call()
        leg = await node.expect(Decode)
        for index in range(1000):
            node.emit(leg, [index], index, finish="length" if index == 999 else "")
        assert await call.result() == list(range(1000))


async def test_a_port_in_use_is_an_error_with_its_name() -> None:
    async with relaying() as rig:
        port = int(rig.control.address.rpartition(":")[2])
        with pytest.raises(InvalidSetting, match=f"127.0.0.1:{port}"):
            ControlLink(rig.context, ControlPort("127.0.0.1", port, links.LinkSettings()), NodeRegistry({MODEL: None}))


async def test_a_node_that_cannot_be_reached_is_reported() -> None:
    async with relaying() as rig:
        assert not rig.control.send(123456, Cancel(b"h" * 16, 1))
        node: FakeNode = await rig.join(DECODE)
        assert rig.control.send(node.hello.epoch, Cancel(b"h" * 16, 1))
        await node.expect(Cancel)
