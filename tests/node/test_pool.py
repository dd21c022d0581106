"""The pool of a node: who may write into it, and the ends that its legs ask for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest
import zmq

from baton.decode_node.node import DECODE_ROLE
from baton.engine.runner.kv_memory import SharedRegion
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.receiving_end import ReceivingEnd
from baton.kvtransfer.sending_end import SendingEnd
from baton.kvtransfer.transports.registry import TransportSettings, pulling_settings, source_settings
from baton.kvtransfer.write_proof import WriteProof
from baton.node.mixed import mixed_role
from baton.node.pool import Context, Ends, NodeParts, NodePool
from baton.node.role import Role
from baton.node.settings import NodeSettings
from baton.prefill_node.node import PREFILL_ROLE
from baton.runtime.watchdog import Watchdog
from baton.wire import links
from baton.wire.errors import InvalidSetting
from tests.free_port import free_port
from tests.kvtransfer.pools import BLOCK_BYTES, LAYOUT

NUM_BLOCKS = 4
MIXED_ROLE = mixed_role("", cast(Any, None), cast(Any, None))


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


def pool_of(context: Context, role: Role, **settings: Any) -> NodePool:
    return NodePool(NodeSettings(**settings), context, links.LinkSettings(), role.name, role.pool)


def ends_of(pool: NodePool) -> Ends:
    """Over memory of the pool, as an engine lays it out."""
    found = pool.allocate(NUM_BLOCKS * BLOCK_BYTES)
    array = found.array if isinstance(found, SharedRegion) else found
    memory = SimpleNamespace(layout=LAYOUT, is_divided=False, blocks=np.asarray(array).reshape(NUM_BLOCKS, -1))
    engine = cast(Any, SimpleNamespace(memory=memory, fingerprint="f", num_blocks=NUM_BLOCKS))
    return pool.open_ends(NodeParts(engine, "n", 1, lambda name: Watchdog().beat(name, 60.0)))


def transfer_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kv-"))


@pytest.mark.parametrize(
    ("role", "is_open"),
    [(PREFILL_ROLE, False), (DECODE_ROLE, True), (MIXED_ROLE, True)],
    ids=["prefill", "decode", "any"],
)
def test_peers_can_write_into_the_pool_of_a_node_that_takes_kv_and_of_no_other(
    context: Context, role: Role, is_open: bool
) -> None:
    pool = pool_of(context, role)
    try:
        assert isinstance(pool.allocate(NUM_BLOCKS * BLOCK_BYTES), SharedRegion) is is_open
    finally:
        pool.close()


def test_what_is_handed_over_leaves_by_the_port_after_those_that_kv_comes_by(context: Context) -> None:
    port = free_port()
    pool = pool_of(context, DECODE_ROLE, kv_transport="zmq", port=port)
    ends = ends_of(pool)
    try:
        received = ends.receive(ends.transports)
        _, address = ends.send(source_settings(ends.transports))
        assert [each.endpoint.address for each in received.side.connections.receivers] == [f"tcp://127.0.0.1:{port}"]
        assert address == f"tcp://127.0.0.1:{port + 1}"
        assert transfer_threads() == ["kv-receiving", "kv-sending"]
    finally:
        ends.close()
        pool.close()
    assert transfer_threads() == []


def test_an_end_that_cannot_be_opened_leaves_no_thread_of_the_other_behind(context: Context) -> None:
    port = free_port()
    taken = context.socket(zmq.ROUTER)
    taken.bind(f"tcp://127.0.0.1:{port + 1}")
    pool = pool_of(context, DECODE_ROLE, kv_transport="zmq", port=port)
    ends = ends_of(pool)
    try:
        with pytest.raises(InvalidSetting, match=str(port + 1)):
            DECODE_ROLE.open_leg(cast(Any, None), ends)
    finally:
        taken.close()
        ends.close()
        pool.close()
    assert transfer_threads() == []


@pytest.mark.parametrize("choice", ["auto", "shm", "zmq"])
def test_a_prefill_node_is_dialled_at_its_port_and_takes_prefixes_by_the_next(context: Context, choice: str) -> None:
    """Its pool stays closed: whatever transport is chosen, what comes is written by the node itself."""
    port = free_port()
    pool = pool_of(context, PREFILL_ROLE, kv_transport=choice, port=port)
    ends = ends_of(pool)
    try:
        _, address = ends.send(ends.transports)
        by = pulling_settings(ends.transports)
        assert by is not None
        receivers = {each.endpoint.transport: each for each in ends.receive(by).side.connections.receivers}
        assert address == f"tcp://127.0.0.1:{port}"
        assert receivers["zmq"].endpoint.address == f"tcp://127.0.0.1:{port + 1}"
        assert set(receivers) == ({"zmq"} if choice == "zmq" else {"shm_slots", "zmq"})
        assert not any(each.write_proof is WriteProof.WRITER_ENDED for each in receivers.values())
    finally:
        ends.close()
        pool.close()


@pytest.mark.parametrize("choice", ["shm", "nixl"])
@pytest.mark.parametrize("pulls", [True, False])
def test_a_node_opens_for_pulls_what_they_take_and_no_more(context: Context, choice: str, *, pulls: bool) -> None:
    """Without them a prefill node has no receiving end, and with nixl no decode node has a second agent."""
    engine, opened = cast(Any, MagicMock()), list[str]()
    engine.memory.is_divided = False

    def receive(by: TransportSettings) -> ReceivingEnd:
        opened.append(f"receive {by.choice}")
        return ReceivingEnd(MagicMock(), MagicMock(), MagicMock())

    def send(by: TransportSettings) -> tuple[SendingEnd, str]:
        opened.append(f"send {by.choice}")
        return SendingEnd(MagicMock(), MagicMock(), MagicMock()), "address"

    transports = TransportSettings(choice, context, "127.0.0.1", links.LinkSettings(), this_process())
    ends = cast(Any, SimpleNamespace(transports=transports, pulls=pulls, receive=receive, send=send))
    prefill, _ = PREFILL_ROLE.open_leg(engine, ends)
    assert (prefill.can_pull, opened) == (pulls, [f"send {choice}", *[f"receive {choice}"] * pulls])
    opened.clear()
    decode, address = DECODE_ROLE.open_leg(engine, ends)
    by = choice if pulls else source_settings(transports).choice
    assert (decode.can_pull, opened) == (pulls, [f"receive {choice}", f"send {by}"])
    assert address == ("" if choice == "nixl" and not pulls else "address")
