"""The timings that a relay reports for a request, compared with what its client measured on the same clock."""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from baton.bench.breakdown import TTST_PARTS, breakdown_of
from baton.bench.client.outcome import Outcome
from baton.demo.location import checkpoint_path
from baton.runtime.clock import host_clock
from tests.system.conftest import running
from tests.system.harness import REQUEST_TIMEOUT_S, Relay, start_relay

NUM_TOKENS = 12
PROMPT = "The old lighthouse keeper wrote down every ship that passed. " * 12
STATIONS = (
    "received_us",
    "sent_us",
    "prefill_begun_us",
    "first_sampled_us",
    "kv_ready_us",
    "decode_begun_us",
    "second_sampled_us",
    "second_written_us",
)


def ask(endpoint: str, prompt: str) -> Outcome:
    """One streamed completion, with a stamp for each event as it is read."""
    url = urlsplit(endpoint)
    assert url.hostname is not None
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=REQUEST_TIMEOUT_S)
    outcome = Outcome(index=0, scheduled_s=0.0)
    try:
        connection.connect()
        body = {
            "model": model_of(connection),
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_timings": True,
        }
        outcome.sent_s = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        while line := answer.readline():
            came_s = time.monotonic()
            if line.startswith(b"data: {"):
                take(outcome, json.loads(line.removeprefix(b"data: ")), came_s)
    finally:
        connection.close()
    outcome.num_output_tokens = outcome.usage["completion_tokens"]
    return outcome


def model_of(connection: http.client.HTTPConnection) -> str:
    connection.request("GET", "/v1/models")
    return str(json.loads(connection.getresponse().read())["data"][0]["id"])


def take(outcome: Outcome, event: dict[str, object], came_s: float) -> None:
    if event["choices"]:
        outcome.chunk_s.append(came_s)
        outcome.chunk_tokens.append(1)
    elif isinstance(event["usage"], dict):
        outcome.usage = event["usage"]


@pytest.mark.parametrize("num_prefills", [1, 0])
def test_the_parts_of_a_request_sum_to_what_its_client_measured(
    tmp_path: Path, relays: list[Relay], num_prefills: int
) -> None:
    started = start_relay(
        checkpoint_path(), tmp_path, prefill=[()] * num_prefills, router=("--local-prefill-tokens", "0")
    )
    for relay in running(started, relays):
        ask(relay.router.address, "The first request connects the nodes.")
        outcome = ask(relay.router.address, PROMPT)
        timings = outcome.timings
        assert (timings["clock"], timings["attempts"]) == (host_clock(), 1)
        assert (timings["kv_ready_us"] is not None) == bool(num_prefills)
        stamps = [timings[name] for name in STATIONS if timings[name] is not None]
        assert len(stamps) == len(STATIONS) - 1 + num_prefills
        stamps = [outcome.sent_s * 1e6, *stamps, outcome.chunk_s[1] * 1e6]
        assert stamps == sorted(stamps)
        assert timings["first_sampled_us"] <= timings["first_written_us"] <= outcome.chunk_s[0] * 1e6
        found = breakdown_of(outcome)
        assert found is not None
        assert found.ttst is not None
        assert found.ttft.measured_ms == pytest.approx((outcome.chunk_s[0] - outcome.sent_s) * 1e3)
        assert found.ttft.error < 0.02
        assert found.ttst.error < 0.02
        parts = dict(zip(TTST_PARTS, found.ttst.parts_ms, strict=True))
        assert (parts["exposed_transfer"] > 0) == bool(num_prefills)
        assert relay.router.metrics().value("request_queue_time_seconds_count") == 2
