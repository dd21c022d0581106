"""The router's hop: how tokens are stamped, what is made of the stamps, and the real router in a small setting."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from baton.bench.limits.router_hop import (
    RatePlan,
    Received,
    RouterPlan,
    RouterSamples,
    Way,
    measure_router_hop,
    measure_router_rate,
    receive_streams,
    router_ratios,
)
from baton.wire.errors import RequestFailed

EVENTS = [b'data: {"text":"a"}\n\n', b'data: {"text":"b"}\n\n', b"data: [DONE]\n\n"]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(event: bytes) -> bytes:
    return f"{len(event):x}\r\n".encode() + event + b"\r\n"


WHOLE = HEAD + b"".join(map(chunked, EVENTS)) + b"0\r\n\r\n"


@contextmanager
def server(answer: bytes, piece_bytes: int = 1000) -> Iterator[str]:
    """Takes one connection, gives `answer` in pieces and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5.0)

        def serve() -> None:
            connection, _ = listener.accept()
            # a client that has read the last event may leave before the rest
            with connection, suppress(ConnectionError):
                connection.settimeout(5.0)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.recv(65536)
                for at in range(0, len(answer), piece_bytes):
                    connection.sendall(answer[at : at + piece_bytes])
                connection.shutdown(socket.SHUT_WR)
                connection.recv(65536)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(30.0)


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 1000])
def test_a_stream_has_one_stamp_per_token_wherever_it_is_cut(piece_bytes: int) -> None:
    with server(WHOLE, piece_bytes) as url:
        (received,) = receive_streams(url, "m", [[1]], num_tokens=2, limit_s=20.0)
    assert len(received.token_s) == 2
    assert received.sent_s < received.token_s[0] <= received.token_s[1]


def test_a_stream_that_breaks_off_is_an_error() -> None:
    with server(HEAD + b"".join(map(chunked, EVENTS[:2]))) as url, pytest.raises(RequestFailed, match="after 2 of 3"):
        receive_streams(url, "m", [[1]], num_tokens=3, limit_s=20.0)


def test_an_error_status_is_an_error() -> None:
    with (
        server(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy") as url,
        pytest.raises(RequestFailed, match=r"(?s)answered 503.*busy"),
    ):
        receive_streams(url, "m", [[1]], num_tokens=1, limit_s=20.0)


def samples() -> RouterSamples:
    """Two rounds of two requests of three tokens: 500 us through the router, 100 without, the first token later."""
    found = RouterSamples(2, 3, cpu_s=[0.006, 0.012])
    for _ in range(2):
        made_s = [10.1, 10.2]
        for way, late_s in ((found.routed, 500e-6), (found.direct, 100e-6)):
            first_s = 10.0 + 2 * late_s
            way.add([Received(10.0, [first_s, 10.1 + late_s, 10.2 + late_s]) for _ in range(2)], made_s)
    return found


def test_a_token_counts_from_its_step_and_the_first_from_its_request() -> None:
    way = Way()
    way.add([Received(1.0, [1.5, 2.25, 3.5])], [2.0, 3.0])
    assert way.first_us == [[pytest.approx(0.5e6)]]
    assert way.token_us == [[pytest.approx(0.25e6), pytest.approx(0.5e6)]]
    with pytest.raises(ValueError, match="zip"):  # a missing token is no measurement
        way.add([Received(1.0, [1.5, 2.25])], [2.0, 3.0])


def test_the_router_costs_what_the_bare_way_does_not() -> None:
    found = {(ratio.name, ratio.case): ratio for ratio in router_ratios(samples())}
    for percent in (50, 99):
        assert found["router_us_per_token", f"concurrency 2, p{percent}"].value == pytest.approx(400)
        assert found["router_ttft_us", f"concurrency 2, p{percent}"].value == pytest.approx(800)
    cpu = found["router_cpu_s_per_1000_tokens", "concurrency 2"]
    assert (cpu.low, cpu.value, cpu.high) == pytest.approx((1.0, 1.5, 2.0))


def test_a_real_router_passes_every_token_on() -> None:
    plan = RouterPlan(concurrencies=(1, 3), num_rounds=2, num_tokens=12, interval_s=0.005, num_prompt_tokens=20)
    found = measure_router_hop(plan, lambda _: None)
    assert [each.concurrency for each in found] == [1, 3]
    for each in found:
        for way in (each.routed, each.direct):
            assert [len(of_round) for of_round in way.token_us] == [each.concurrency * 11] * 2
            # stamped before it is sent
            assert min(map(min, way.token_us + way.first_us)) > 0
        assert min(each.cpu_s) > 0


def test_the_rate_of_a_real_router_and_its_share_of_a_core_are_found() -> None:
    plan = RatePlan(concurrencies=(3,), num_rounds=2, num_events=120, events_per_s=300, num_prompt_tokens=8)
    rate, share = measure_router_rate(plan, lambda _: None)
    assert (rate.name, rate.case, rate.goal) == ("router_events_per_cpu_s", "concurrency 3", "300")
    assert (share.name, share.case) == ("router_core_share", "concurrency 3, 300 events/s")
    for found in (rate, share):
        assert 0 < found.low <= found.value <= found.high
