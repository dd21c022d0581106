"""Helper: a server that sends the same bytes to everybody and then keeps the connection open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def raw_server(answer: bytes) -> AsyncIterator[str]:
    """Its base URL. It answers as soon as something has come."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ConnectionError):
            if await reader.read(65536):
                writer.write(answer)
                await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await server.wait_closed()
