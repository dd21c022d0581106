"""HTTPS, and a certificate that changes while the router runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.router.http.access.tls import ServerTls
from baton.wire.errors import InvalidSetting

CERTIFICATES = Path(__file__).with_name("certificates")
ONE, TWO = CERTIFICATES / "one.pem", CERTIFICATES / "two.pem"


@asynccontextmanager
async def _listening(tls: ServerTls) -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls.context)
    async with server:
        port: int = server.sockets[0].getsockname()[1]
        yield port


async def _is_shown(certificate: Path, port: int) -> bool:
    """Whether a server shows a certificate that a client takes for this one."""
    try:
        trusting = ssl.create_default_context(cafile=str(certificate))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    except ssl.SSLCertVerificationError:
        return False
    writer.write(b"hello\n")
    assert await reader.readline() == b"hello\n"
    writer.close()
    await writer.wait_closed()
    return True


async def test_a_new_certificate_is_shown_to_new_connections(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "server.pem"
    path.write_bytes(ONE.read_bytes())
    tls = ServerTls(str(path), "")
    async with _listening(tls) as port:
        assert await _is_shown(ONE, port)
        path.write_bytes(TWO.read_bytes())
        tls.reload()
        assert [await _is_shown(certificate, port) for certificate in (ONE, TWO)] == [False, True]
        path.write_bytes(ONE.read_bytes()[:300])
        with caplog.at_level(logging.ERROR):
            tls.reload()
        assert "stays as it was" in caplog.text
        assert await _is_shown(TWO, port)


@pytest.mark.parametrize(("certificate", "key"), [("/no/such/file", ""), (str(ONE), str(TWO)), (__file__, "")])
def test_files_that_are_no_certificate_are_one_sentence(certificate: str, key: str) -> None:
    with pytest.raises(InvalidSetting, match="--ssl-certfile"):
        ServerTls(certificate, key)
