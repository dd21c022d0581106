"""A node with several routers: what each of them is told, and what it may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from baton.engine.scheduler.reading import RowsRead
from baton.node.router_link import FIRST_RETRY_S, ROUTER_TIMEOUT_S, RouterLink
from baton.node.router_links import Heard, RouterLinks
from baton.wire.errors import InvalidSetting, Refused, RequestFailed
from baton.wire.messages.legs import Cancel, Decode, HandedOver, HandOver
from baton.wire.messages.membership import Hello, Introduce, Leaving, Pong, Refusal, Welcome, live_key
from baton.wire.messages.output import Failed, PromptRead, TokenEvent, Tokens
from baton.wire.messages.prefixes import CacheEvents
from baton.wire.messages.vocabulary import ROUTER_TO_NODE
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey, new_handoff_id, owner_of_epoch
from baton.wire.sampling import DecodingParams
from tests.node.conftest import HELLO, SETTINGS, STATUS, WAIT_MS, FakeRouter, marker_of

ONE, TWO = 2**40, 2**41
"""Epochs of two routers."""
ID_OF_ONE, ID_OF_TWO = new_handoff_id(owner_of_epoch(ONE)), new_handoff_id(owner_of_epoch(TWO))
EPOCH = HELLO.epoch
Context = zmq.Context[zmq.Socket[bytes]]
Open = Callable[[int], FakeRouter]
Connect = Callable[..., RouterLinks]


@pytest.fixture
def open_router(context: Context) -> Iterator[Open]:
    """`open_router(epoch)`: a router of that epoch."""
    opened: list[FakeRouter] = []

    def begin(epoch: int) -> FakeRouter:
        opened.append(FakeRouter(context, epoch=epoch))
        return opened[-1]

    yield begin
    for router in opened:
        router.socket.close()


@pytest.fixture
def one(open_router: Open) -> FakeRouter:
    return open_router(ONE)


@pytest.fixture
def two(open_router: Open) -> FakeRouter:
    return open_router(TWO)


@pytest.fixture
def connect(context: Context) -> Iterator[Connect]:
    """`connect(*routers)`: the links of a node to these, with no one registered."""
    opened: list[RouterLinks] = []

    def begin(*routers: FakeRouter) -> RouterLinks:
        dialled = [RouterLink(context, router.address, SETTINGS, HELLO, lambda: STATUS, 0.0) for router in routers]
        opened.append(RouterLinks(dialled))
        return opened[-1]

    yield begin
    for links in opened:
        links.close()


def next_heard(links: RouterLinks, now_s: float = 0.0) -> Heard:
    """What a router says next."""
    for _ in range(WAIT_MS):
        heard = links.receive(now_s)
        if heard:
            (only,) = heard
            return only
        zmq.select(list(links.sockets), [], [], 0.001)
    raise AssertionError("no message came")


def requests_of(links: RouterLinks, router: FakeRouter) -> list[Any]:
    """What that router has asked for, up to its marker."""
    requests: list[Any] = []
    while marker_of(router.epoch) not in requests:
        requests += next_heard(links).requests
    return requests[:-1]


def register(links: RouterLinks, router: FakeRouter) -> None:
    assert isinstance(router.receive(), Hello)
    router.send(Welcome(router.epoch + 1, router.epoch))
    heard = next_heard(links)
    assert heard.void == b""
    requests = list(heard.requests)
    while marker_of(router.epoch) not in requests:
        requests += next_heard(links).requests


@pytest.fixture
def links(connect: Connect, one: FakeRouter, two: FakeRouter) -> RouterLinks:
    """Registered with both routers."""
    made = connect(one, two)
    for router in (one, two):
        register(made, router)
    return made


def leg(handoff_id: bytes, *forks: bytes) -> Decode:
    return Decode(handoff_id, 1, Prompt((1,)), DecodingParams(max_tokens=1), None, forks=forks)


def test_what_is_said_of_a_request_goes_to_its_router_alone(
    links: RouterLinks, one: FakeRouter, two: FakeRouter
) -> None:
    own, others = (TokenEvent(each, 1, 0, (5,), (), "", 0) for each in (ID_OF_ONE, ID_OF_TWO))
    links.send_tokens([own, others, own])
    links.send_failed(ID_OF_ONE, 1, RequestFailed("x"))
    links.send_handed_over(HandOver(ID_OF_TWO, 1, 2, "e", 5), 3)
    links.send_read(RequestKey(ID_OF_TWO, 1), RowsRead(0, 1, bytes(8), True))
    links.leave(0.0)
    assert [one.receive() for _ in range(3)] == [
        Tokens(EPOCH, (own, own)),
        Failed(ID_OF_ONE, 1, "request_failed", "x"),
        Leaving(EPOCH),
    ]
    assert [two.receive() for _ in range(4)] == [
        Tokens(EPOCH, (others,)),
        HandedOver(EPOCH, ID_OF_TWO, 2, 3),
        PromptRead(EPOCH, ID_OF_TWO, 1, 0, 1, bytes(8)),
        Leaving(EPOCH),
    ]


def test_all_routers_learn_what_is_cached(links: RouterLinks, one: FakeRouter, two: FakeRouter) -> None:
    links.send_cache_changes([b"s" * 16], [b"r" * 16])
    assert one.receive() == two.receive() == CacheEvents(EPOCH, False, b"s" * 16, b"r" * 16)


def test_a_router_is_told_of_its_own_attempts_and_how_much_others_have_here(
    links: RouterLinks, one: FakeRouter
) -> None:
    one.ping()
    while not links.owe_pong:
        links.receive(0.0)
    keys = [RequestKey(ID_OF_ONE, 1), RequestKey(ID_OF_TWO, 1), RequestKey(ID_OF_TWO, 2)]
    links.answer_pings(keys, [(keys[0], 100), (keys[2], 20)])
    pong = one.receive()
    assert isinstance(pong, Pong)
    assert pong.live_keys == {live_key(ID_OF_ONE, 1)}
    assert (pong.num_other_legs, pong.num_other_prompt_tokens) == (2, 20)
    assert not links.owe_pong


def test_what_a_router_asks_of_requests_of_another_one_is_refused(links: RouterLinks, one: FakeRouter) -> None:
    lies = [Cancel(ID_OF_TWO, 1), HandOver(ID_OF_TWO, 1, 2, "e", 5), leg(ID_OF_TWO), leg(ID_OF_ONE, ID_OF_TWO)]
    one.send(*lies, leg(ID_OF_ONE))
    assert requests_of(links, one) == [leg(ID_OF_ONE)]
    assert links.num_rejected_messages == len(lies)
    refused = [one.receive() for _ in range(3)]
    assert [each.code for each in refused] == ["invalid_message"] * 3
    assert [each.handoff_id for each in refused] == [ID_OF_TWO, ID_OF_ONE, ID_OF_TWO]


def test_when_a_router_starts_again_only_its_own_requests_are_void(links: RouterLinks, one: FakeRouter) -> None:
    one.epoch = 2**42
    one.send(Welcome(2**50, one.epoch), Cancel(ID_OF_ONE, 1))
    heard = next_heard(links)
    assert heard.void == owner_of_epoch(ONE)
    assert Cancel(ID_OF_ONE, 1) not in heard.requests, "this life of the router has no such request"


def test_the_silence_of_one_router_is_not_that_of_the_other(links: RouterLinks, two: FakeRouter) -> None:
    two.ping()
    while not links.owe_pong:
        links.receive(ROUTER_TIMEOUT_S - 0.1)
    (heard,) = links.receive(ROUTER_TIMEOUT_S)
    assert heard.void == owner_of_epoch(ONE)
    assert links.is_registered
    two.send(leg(ID_OF_TWO))
    assert requests_of(links, two) == [leg(ID_OF_TWO)]


def test_a_router_that_claims_the_epoch_of_another_one_has_no_say(
    links: RouterLinks, one: FakeRouter, two: FakeRouter
) -> None:
    two.send(Welcome(2**51, ONE), Cancel(ID_OF_ONE, 1))
    heard = next_heard(links)
    assert (heard.void, heard.requests) == (owner_of_epoch(TWO), [])
    two.send(Cancel(ID_OF_ONE, 1))
    one.send(leg(ID_OF_ONE))
    assert requests_of(links, one) == [leg(ID_OF_ONE)]
    links.send_failed(ID_OF_ONE, 1, RequestFailed("x"))
    assert isinstance(one.receive(), Failed)


def test_two_addresses_of_one_router_are_a_mistake_that_is_named(
    connect: Connect, one: FakeRouter, two: FakeRouter
) -> None:
    links = connect(one, two)
    register(links, one)
    two.receive()
    two.send(Welcome(ONE + 1, ONE))
    with pytest.raises(InvalidSetting, match=f"{one.address} and {two.address} are one router"):
        next_heard(links)


def test_a_router_that_refuses_the_node_does_not_keep_it_from_another_one(
    connect: Connect, one: FakeRouter, two: FakeRouter
) -> None:
    links = connect(one, two)
    register(links, one)
    two.receive()
    for now_s, message in ((0.0, Refusal("another model")), (1.0, Introduce()), (FIRST_RETRY_S, Introduce())):
        two.send_raw(ROUTER_TO_NODE.encode(message))
        assert zmq.select(list(links.sockets), [], [], WAIT_MS / 1000)[0]
        links.receive(now_s)
        assert links.is_registered
    register(links, two)
    assert not two.socket.poll(0), "it has asked again once"


def test_a_node_that_no_router_has_had_ends_with_the_reason_of_the_one_that_refuses_it(
    connect: Connect, one: FakeRouter, two: FakeRouter
) -> None:
    links = connect(one, two)
    two.receive()
    two.send(Refusal("another model"))
    with pytest.raises(Refused, match=f"{two.address} refused this node: another model"):
        next_heard(links)


def test_a_node_leaves_when_all_its_routers_have_heard_it(links: RouterLinks, one: FakeRouter, two: FakeRouter) -> None:
    links.leave(0.0)
    for router, has_left in ((one, False), (two, True)):
        router.receive()
        router.ping()
        router.send()
        requests_of(links, router)
        assert links.has_left(0.5) is has_left
