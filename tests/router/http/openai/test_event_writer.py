"""How many events a client has been told, which is what the last event of a failed stream is numbered by."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from baton.router.http.openai.event_writer import EventWriter
from baton.router.http.resume.requests import EventIds
from baton.router.http.serving.body_writer import BodyWriter


@pytest.fixture(autouse=True)
def no_memory_for_the_third(monkeypatch: pytest.MonkeyPatch) -> None:
    async def write(_: BodyWriter, piece: bytes) -> None:
        if b"data: 3" in piece:
            raise MemoryError

    monkeypatch.setattr(BodyWriter, "write", write)


@pytest.mark.parametrize("ids", [None, EventIds("s"), EventIds("s", 1)], ids=["no ids", "begun", "resumed"])
async def test_an_event_that_could_not_be_sent_was_not_told(ids: EventIds | None) -> None:
    with EventWriter(make_mocked_request("POST", "/"), ids) as writer:
        await writer.write(b"data: 1\n\ndata: 2\n\n")
        with pytest.raises(MemoryError):
            await writer.write(b"data: 3\n\n")
        assert writer.num_told == 2


async def test_a_resumed_client_had_been_told_more_than_was_made_again() -> None:
    with EventWriter(make_mocked_request("POST", "/"), EventIds("s", 5)) as writer:
        await writer.write(b"data: 1\n\ndata: 2\n\n")
        assert writer.num_told == 5
