"""Random bodies: of every kind, to every route, none larger than it should be, and what is wrong with an answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from baton.router.http.docs.routes import ROUTES
from tests.campaign import bodies, checks
from tests.campaign.bodies import Sent, make_sent
from tests.campaign.faults import Happened
from tests.campaign.schedule import Fault
from tests.campaign.strangers import Answered, Strangers, answer_to

Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
KILLED_ROUTER = Fault(0, 0.0, "router-kill", "router", 1.0, "", 0.0, 0.0)
SENT = Sent("types, whole", "POST /x", b"POST /x HTTP/1.1\r\nContent-Length: 2\r\n\r\n", (b"{}",))


def test_bodies_are_of_every_kind_and_go_to_every_route() -> None:
    sent = [make_sent(random.Random(seed), sees=True) for seed in range(300)]
    again = make_sent(random.Random(7), sees=True)
    assert (again.head, again.pieces) == (sent[7].head, sent[7].pieces)
    contents, ways = ({each.kind.split(", ")[place] for each in sent} for place in (0, 1))
    assert contents == {"types", "deep", "many", "long", "broken", "noise", "truncated"}
    assert ways == {"whole", "chunked", "gzip", "deflate", "no gzip", "slow", "hung up", "no chunks"}
    targets = {each.target.rpartition("/")[0] for each in sent}
    assert targets >= {f"{method} {path}".rpartition("/")[0] for method, path in ROUTES}
    sizes = [sum(map(len, each.pieces)) for each in sent]
    assert 2**20 < max(sizes) < 4 * bodies.MAX_BODY_BYTES


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[int]:
    """The port of a server that says this to whatever comes, and closes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "status", "is_found", "is_excused"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n{}", 400, False, True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}", 503, False, True),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n{}", 502, True, True),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n{}", 500, True, False),
        (b"", 0, True, True),
    ],
)
async def test_an_answer_of_5xx_or_none_is_found_unless_the_router_was_killed(
    answer: bytes, status: int, *, is_found: bool, is_excused: bool
) -> None:
    async with asyncio.timeout(20), answering(answer) as port:
        answered = await answer_to(SENT, port)
    assert answered.status == status
    assert bool(checks.finding_of_body(answered, [])) == is_found
    killed = Happened(KILLED_ROUTER, answered.begun_s)
    assert bool(checks.finding_of_body(answered, [killed])) == (is_found and not is_excused)


async def test_a_request_that_was_not_sent_to_its_end_is_owed_no_answer() -> None:
    hung_up = Sent("types, hung up", SENT.target, SENT.head, (b"{",), is_owed_an_answer=False)
    async with asyncio.timeout(20), answering(b"") as port:
        assert not checks.finding_of_body(await answer_to(hung_up, port), [])


async def test_strangers_send_one_body_after_another_and_count_what_was_answered() -> None:
    found: asyncio.Queue[Answered] = asyncio.Queue()
    begun_s = time.monotonic()
    async with asyncio.timeout(60), answering(b"HTTP/1.1 404 Not Found\r\n\r\n{}") as port:
        strangers = Strangers(port, 5, found.put_nowait, sees=False)
        strangers.start(2)
        answered = [await found.get() for _ in range(3)]
        await strangers.stop()
    assert all(begun_s <= each.begun_s <= (each.ended_s or 0) for each in answered)
    assert strangers.statuses.total() >= 3
    assert strangers.statuses[404] >= 1
