"""Messages between two processes of a node: many may send while one receives, and every send has a deadline."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import ClassVar

import msgspec
import pytest

from baton.runtime.channel import Channel, ChannelBroken, Message

_WAIT_S = 30.0


class Text(Message, frozen=True):
    """Some bytes."""

    content: bytes


class TextChannel(Channel[Text]):
    """See `Channel`."""

    decoder: ClassVar = msgspec.msgpack.Decoder(Text)


@pytest.fixture
def ends() -> Iterator[tuple[TextChannel, TextChannel]]:
    near, far = (TextChannel(end, "the other") for end in socket.socketpair())
    yield near, far
    near.close()
    far.close()


def test_several_threads_send_whole_messages_beside_a_receive_without_deadline(
    ends: tuple[TextChannel, TextChannel],
) -> None:
    near, far = ends
    heard: list[Text] = []
    hearing = threading.Thread(target=lambda: heard.append(near.receive(None)))
    hearing.start()
    large = [Text(bytes([number]) * 2**19) for number in range(4)]  # more than a socket takes
    saying = [threading.Thread(target=near.send, args=(each, _WAIT_S)) for each in large]
    for thread in saying:
        thread.start()
    assert sorted((far.receive(_WAIT_S) for _ in large), key=lambda text: text.content[:1]) == large
    for thread in saying:
        thread.join(_WAIT_S)
    assert heard == []
    far.send(Text(b"now"), _WAIT_S)
    hearing.join(_WAIT_S)
    assert heard == [Text(b"now")]


def test_a_send_has_its_own_deadline_and_not_that_of_a_receive(ends: tuple[TextChannel, TextChannel]) -> None:
    near, far = ends
    with pytest.raises(ChannelBroken, match="said nothing"):
        near.receive(0.01)
    reading = threading.Timer(0.2, far.receive, (_WAIT_S,))
    reading.start()
    near.send(Text(bytes(2**20)), _WAIT_S)
    reading.join(_WAIT_S)
    with pytest.raises(ChannelBroken, match="takes no messages: timed out"):
        near.send(Text(bytes(2**20)), 0.01)
