from __future__ import annotations

import re

import pytest

from baton.bench.serve.result import report
from tests.bench.serve.outcomes import answered
from tests.bench.serve.results import result_of

# what scripts that read the output of `vllm bench serve` look for, and the value of the run below
LINES_OF_VLLM = [
    (r"^=+ Serving Benchmark Result =+$", None),
    (r"^Successful requests:\s+(\d+)\s*$", 2),
    (r"^Failed requests:\s+(\d+)\s*$", 0),
    (r"^Maximum request concurrency:\s+(\d+)\s*$", 8),
    (r"^Request rate configured \(RPS\):\s+([\d.]+)\s*$", 4.0),
    (r"^Benchmark duration \(s\):\s+([\d.]+)\s*$", 5.0),
    (r"^Total input tokens:\s+(\d+)\s*$", 20),
    (r"^Total generated tokens:\s+(\d+)\s*$", 6),
    (r"^Request throughput \(req/s\):\s+([\d.]+)\s*$", 0.4),
    (r"^Request goodput \(req/s\):\s+([\d.]+)\s*$", 0.2),
    (r"^Output token throughput \(tok/s\):\s+([\d.]+)\s*$", 1.2),
    (r"^Peak output token throughput \(tok/s\):\s+([\d.]+)\s*$", 6.0),
    (r"^Peak concurrent requests:\s+([\d.]+)\s*$", 2.0),
    (r"^Total token throughput \(tok/s\):\s+([\d.]+)\s*$", 5.2),
    (r"^-+Time to First Token-+$", None),
    (r"^Mean TTFT \(ms\):\s+([\d.]+)\s*$", 200.0),
    (r"^Median TTFT \(ms\):\s+([\d.]+)\s*$", 200.0),
    (r"^P99 TTFT \(ms\):\s+([\d.]+)\s*$", 298.0),
    (r"^-+Time per Output Token \(excl\. 1st token\)-+$", None),
    (r"^Mean TPOT \(ms\):\s+([\d.]+)\s*$", 100.0),
    (r"^Median TPOT \(ms\):\s+([\d.]+)\s*$", 100.0),
    (r"^P99 TPOT \(ms\):\s+([\d.]+)\s*$", 100.0),
    (r"^-+Inter-token Latency-+$", None),
    (r"^Mean ITL \(ms\):\s+([\d.]+)\s*$", 100.0),
    (r"^Median ITL \(ms\):\s+([\d.]+)\s*$", 100.0),
    (r"^P99 ITL \(ms\):\s+([\d.]+)\s*$", 100.0),
    (r"^-+End-to-end Latency-+$", None),
    (r"^Mean E2EL \(ms\):\s+([\d.]+)\s*$", 400.0),
    (r"^Median E2EL \(ms\):\s+([\d.]+)\s*$", 400.0),
    (r"^P99 E2EL \(ms\):\s+([\d.]+)\s*$", 498.0),
]


def test_scripts_for_vllm_find_their_lines_in_order_and_read_the_values() -> None:
    outcomes = [answered([0.1, 0.2, 0.3]), answered([0.3, 0.4, 0.5])]
    summary = result_of(outcomes, slo={"ttft": 150.0}, request_rate=4.0, max_concurrency=8).summary
    text = report(summary)
    end = 0
    for pattern, value in LINES_OF_VLLM:
        found = re.compile(pattern, re.MULTILINE).search(text, end)
        assert found is not None, pattern
        end = found.end()
        if value is not None:
            assert float(found.group(1)) == pytest.approx(value)
