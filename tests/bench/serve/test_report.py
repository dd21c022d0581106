from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from baton.bench.serve.result import report
from tests.bench.serve.outcomes import answered
from tests.bench.serve.results import result_of

# what scripts that read the output of `vllm bench serve` look for, and the values of the run below
TOTALS = {
    "Successful requests": 2,
    "Failed requests": 0,
    "Maximum request concurrency": 8,
    r"Request rate configured \(RPS\)": 4.0,
    r"Benchmark duration \(s\)": 5.0,
    "Total input tokens": 20,
    "Total generated tokens": 6,
    r"Request throughput \(req/s\)": 0.4,
    r"Request goodput \(req/s\)": 0.2,
    r"Output token throughput \(tok/s\)": 1.2,
    r"Peak output token throughput \(tok/s\)": 6.0,
    "Peak concurrent requests": 2.0,
    r"Total token throughput \(tok/s\)": 5.2,
}
FAMILIES = {
    ("Time to First Token", "TTFT"): (200.0, 200.0, 298.0),
    (r"Time per Output Token \(excl\. 1st token\)", "TPOT"): (100.0, 100.0, 100.0),
    ("Inter-token Latency", "ITL"): (100.0, 100.0, 100.0),
    ("End-to-end Latency", "E2EL"): (400.0, 400.0, 498.0),
}


def lines_of_vllm() -> Iterator[tuple[str, float | None]]:
    """Each as a pattern, and its value."""
    yield "^=+ Serving Benchmark Result =+$", None
    for label, value in TOTALS.items():
        yield rf"^{label}:\s+([\d.]+)\s*$", value
    for (title, short), values in FAMILIES.items():
        yield f"^-+{title}-+$", None
        for word, value in zip(("Mean", "Median", "P99"), values, strict=True):
            yield rf"^{word} {short} \(ms\):\s+([\d.]+)\s*$", value


def test_scripts_for_vllm_find_their_lines_in_order_and_read_the_values() -> None:
    outcomes = [answered([0.1, 0.2, 0.3]), answered([0.3, 0.4, 0.5])]
    text = report(result_of(outcomes, slo={"ttft": 150.0}, request_rate=4.0, max_concurrency=8).summary)
    assert "Speculative" not in text
    end = 0
    for pattern, value in lines_of_vllm():
        found = re.compile(pattern, re.MULTILINE).search(text, end)
        assert found is not None, pattern
        end = found.end()
        if value is not None:
            assert float(found.group(1)) == pytest.approx(value)


def test_drafts_have_the_lines_of_vllm_where_there_were_any() -> None:
    drafts = {"ngram": {"steps": 3, "tokens": 8, "accepted": 4}}
    drafted = answered([0.1, 0.2, 0.3], num_output=9, completion_tokens_details={"drafts": drafts})
    lines = report(result_of([drafted]).summary).splitlines()
    begin = next(place for place, line in enumerate(lines) if "Speculative Decoding" in line)
    assert [re.split(r"\s{2,}", line)[:2] for line in lines[begin + 1 : begin + 6]] == [
        ["Acceptance rate (%):", "50.00"],
        ["Acceptance length:", "2.33"],
        ["Drafts:", "3"],
        ["Draft tokens:", "8"],
        ["Accepted tokens:", "4"],
    ]
