"""Answers of a relay whose stamps are known."""

from __future__ import annotations

from baton.bench.client.outcome import Outcome
from baton.runtime.clock import host_clock


def answered(ttft_ms: float, exposed_ms: float) -> Outcome:
    """A request whose first token came after `ttft_ms`, 1 ms after it was drawn; its KV was ready `exposed_ms` after it
    was drawn."""
    sent_us = 1_000_000
    sampled_us = sent_us + round(ttft_ms * 1e3) - 1000
    ready_us = sampled_us + round(exposed_ms * 1e3)
    outcome = Outcome(index=0, url="", scheduled_s=1.0, sent_s=1.0)
    outcome.chunk_s = [(sampled_us + 1000) / 1e6, (ready_us + 4000) / 1e6]
    outcome.chunk_tokens = [1, 1]
    outcome.num_output_tokens = 2
    outcome.usage = {
        "completion_tokens": 2,
        "kv_transfer": {"blocks": 4, "bytes": 4000, "exposed_ms": exposed_ms, "transfer_ms": 2.0},
        "timings": {
            "clock": host_clock(),
            "attempts": 1,
            "received_us": sent_us + 200,
            "sent_us": sent_us + 400,
            "prefill_begun_us": sent_us + 600,
            "first_sampled_us": sampled_us,
            "first_written_us": sampled_us + 500,
            "kv_ready_us": ready_us,
            "decode_begun_us": ready_us + 100,
            "second_sampled_us": ready_us + 3000,
            "second_written_us": ready_us + 3500,
        },
    }
    return outcome
