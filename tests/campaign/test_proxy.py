"""Links that are cut, slow or a black hole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.campaign.proxy import DOWN, UP, LinkProxy

WAIT_S = 10.0
SEED = 7
"""Of a link with a loss of 0.5 that loses the first packet once, and not the second one."""


@asynccontextmanager
async def linked(seed: int = 0) -> AsyncIterator[LinkProxy]:
    """A proxy before a server that sends everything back."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1000):
            writer.write(chunk)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = LinkProxy(server.sockets[0].getsockname()[1], seed)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
        server.close()


async def dial(proxy: LinkProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def test_what_a_black_hole_swallowed_comes_in_order_when_it_ends() -> None:
    async with linked() as proxy, asyncio.timeout(WAIT_S):
        reader, writer = await dial(proxy)
        writer.write(b"one ")
        assert await reader.readexactly(4) == b"one "
        for direction in (UP, DOWN):
            proxy.state.held.add(direction)
            writer.write(b"two ")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.readexactly(4), 0.1)
            writer.write(b"three ")
            proxy.heal()
            assert await reader.readexactly(10) == b"two three "
        writer.close()


async def test_a_cut_link_resets_its_connections_and_refuses_new_ones() -> None:
    async with linked() as proxy, asyncio.timeout(WAIT_S):
        reader, writer = await dial(proxy)
        writer.write(b"one ")
        assert await reader.readexactly(4) == b"one "
        proxy.state.is_cut = True
        proxy.reset()
        refused = await dial(proxy)
        for broken in (reader, refused[0]):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await broken.readexactly(1)
        proxy.heal()
        again = await dial(proxy)
        again[1].write(b"two ")
        assert await again[0].readexactly(4) == b"two "
        for each in (writer, refused[1], again[1]):
            each.close()


async def test_a_packet_that_is_lost_comes_when_it_is_sent_again() -> None:
    async with linked(seed=SEED) as proxy, asyncio.timeout(WAIT_S):
        reader, writer = await dial(proxy)
        loop = asyncio.get_running_loop()
        proxy.state.loss = 0.5
        begun_s = loop.time()
        writer.write(b"one ")
        assert await reader.readexactly(4) == b"one "
        assert loop.time() - begun_s >= 0.19
        writer.close()


async def test_a_link_is_delayed_and_throttled() -> None:
    async with linked() as proxy, asyncio.timeout(WAIT_S):
        reader, writer = await dial(proxy)
        loop = asyncio.get_running_loop()
        for delay_s, bytes_per_s in ((0.05, 0.0), (0.0, 100.0)):
            proxy.state.delay_s, proxy.state.bytes_per_s = delay_s, bytes_per_s
            begun_s = loop.time()
            writer.write(b"12345")
            assert await reader.readexactly(5) == b"12345"
            assert loop.time() - begun_s >= 0.09
        writer.close()


async def test_what_a_throttled_link_still_carries_comes_when_it_is_healed() -> None:
    async with linked() as proxy, asyncio.timeout(WAIT_S):
        reader, writer = await dial(proxy)
        proxy.state.bytes_per_s = 0.1
        writer.write(b"12345")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(5), 0.1)
        proxy.heal()
        assert await reader.readexactly(5) == b"12345"
        writer.close()


async def test_a_link_that_lies_turns_a_bit_or_says_something_again() -> None:
    async with linked() as proxy, asyncio.timeout(WAIT_S):
        reader, writer = await dial(proxy)
        proxy.state.flips = 1.0
        writer.write(bytes(8))
        assert sum(byte.bit_count() for byte in await reader.readexactly(8)) in (
            0,
            2,
        )  # each way one, or the same twice
        assert proxy.num_lies == 2
        proxy.heal()
        proxy.state.replays = 1.0
        again = await dial(proxy)
        again[1].write(b"again")
        assert await again[0].readexactly(20) == b"again" * 4
        for each in (writer, again[1]):
            each.close()
