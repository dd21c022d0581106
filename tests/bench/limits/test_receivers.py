from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from bench.limits.receivers import EventCounter, receive_streams

from wire.errors import RequestFailed

EVENTS = [b'data: {"text":"a"}\n\n', b'data: {"text":"b"}\n\n', b"data: [DONE]\n\n"]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(event: bytes) -> bytes:
    return f"{len(event):x}\r\n".encode() + event + b"\r\n"


@contextmanager
def server(answer: bytes) -> Iterator[str]:
    """Takes one connection, gives `answer` and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5.0)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(5.0)
                connection.recv(65536)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(65536)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(5.0)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_counted_wherever_the_pieces_are_cut(size: int) -> None:
    whole = HEAD + b"".join(map(chunked, EVENTS)) + b"0\r\n\r\n"
    counter = EventCounter()
    assert sum(counter.count(whole[at : at + size]) for at in range(0, len(whole), size)) == len(EVENTS)


def test_a_stream_has_one_stamp_per_token() -> None:
    with server(HEAD + b"".join(map(chunked, EVENTS))) as url:
        (received,) = receive_streams(url, "m", [[1]], num_tokens=2, duration_s=0.0)
    assert len(received.token_s) == 2
    assert received.sent_s < received.token_s[0] <= received.token_s[1]


def test_a_stream_that_breaks_off_is_an_error() -> None:
    with server(HEAD + b"".join(map(chunked, EVENTS[:2]))) as url, pytest.raises(RequestFailed, match="after 2 of 3"):
        receive_streams(url, "m", [[1]], num_tokens=3, duration_s=0.0)


def test_an_error_status_is_an_error() -> None:
    with (
        server(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy") as url,
        pytest.raises(RequestFailed, match=r"(?s)answered 503.*busy"),
    ):
        receive_streams(url, "m", [[1]], num_tokens=1, duration_s=0.0)
