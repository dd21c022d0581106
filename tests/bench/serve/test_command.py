"""`baton bench serve` as the program it is, against servers whose times are known."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import pytest

from tests.bench.client.rig import Announcing
from tests.bench.mock_server.schedule import Answer, Fault, FaultKind, Script
from tests.bench.mock_server.server import MockServer, mock_server

TIMEOUT_S = 50.0
GAP_S = 0.03
ROOT = Path(__file__).resolve().parents[3]
VLLM_KEYS = {
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    *(f"{word}_{name}_ms" for word in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}
DETAILED_KEYS = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}


@asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton", "bench", "serve", "--vocab-size", "500", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def run(*arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)."""
    async with started(*arguments) as process, asyncio.timeout(TIMEOUT_S):
        out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()


def flags(server: MockServer, **values: object) -> list[str]:
    words = {"num_prompts": 4, "random_input_len": 16, "random_output_len": 4, **values}
    return [f"--base-url={server.url}", *(f"--{name.replace('_', '-')}={value}" for name, value in words.items())]


def value_of(text: str, label: str) -> float:
    found = re.search(rf"^{label}:\s+([\d.]+)", text, re.MULTILINE)
    assert found is not None, label
    return float(found.group(1))


def assert_near(ours_ms: Sequence[float], theirs_ms: Sequence[float]) -> None:
    """Within half of the time between two tokens for those requests that the machine held up least: the others prove
    nothing. A stamp of another token would be off by that time in all of them."""
    off_ms = sorted(abs(our - their) for our, their in zip(ours_ms, theirs_ms, strict=True))
    assert off_ms[len(off_ms) // 4] <= GAP_S * 1e3 / 2


async def test_what_it_measures_is_what_the_server_did(tmp_path: Path) -> None:
    quick, slow = Answer(0.1, (GAP_S,) * 7), Answer(0.4, (1.5 * GAP_S,) * 7)
    async with mock_server(Script((quick, slow))) as server:
        status, out, err = await run(
            *flags(server, num_prompts=20, random_output_len=8, request_rate=20),
            *("--goodput", "ttft:250", "tpot:80", "--save-result", "--save-detailed"),
            *("--result-dir", str(tmp_path), "--result-filename", "result.json"),
        )
        records = sorted(server.records, key=lambda record: record.received_s)
    assert status == 0, err
    result = json.loads((tmp_path / "result.json").read_text())
    assert result.keys() >= VLLM_KEYS | DETAILED_KEYS

    sent_s = result["start_times"]
    first_ms = [(record.written_s[0] - at_s) * 1e3 for record, at_s in zip(records, sent_s, strict=True)]
    last_ms = [(record.written_s[-1] - at_s) * 1e3 for record, at_s in zip(records, sent_s, strict=True)]
    spans_ms = [(record.written_s[-1] - record.written_s[0]) / 7 * 1e3 for record in records]
    ttfts_ms = [ttft_s * 1e3 for ttft_s in result["ttfts"]]
    assert_near(ttfts_ms, first_ms)
    assert_near([latency_s * 1e3 for latency_s in result["latencies"]], last_ms)
    assert_near([sum(gaps_s) / len(gaps_s) * 1e3 for gaps_s in result["itls"]], spans_ms)

    tpots_ms = [sum(gaps_s) / len(gaps_s) * 1e3 for gaps_s in result["itls"]]
    num_good = sum(ttft <= 250 and tpot <= 80 for ttft, tpot in zip(ttfts_ms, tpots_ms, strict=True))
    assert (result["completed"], result["failed"], result["slo_attainment"]) == (20, 0, num_good / 20)
    assert num_good <= 10  # half of the answers begin after 400 ms
    assert result["request_goodput"] == pytest.approx(num_good / result["duration"])
    assert result["median_ttft_ms"] == pytest.approx(median(ttfts_ms), abs=0.01)
    assert value_of(out, r"Median TTFT \(ms\)") == pytest.approx(result["median_ttft_ms"], abs=0.01)
    assert value_of(out, r"P99 ITL \(ms\)") == pytest.approx(result["p99_itl_ms"], abs=0.01)
    assert value_of(out, r"Request goodput \(req/s\)") == pytest.approx(result["request_goodput"], abs=0.01)
    assert "20/20" in err


async def test_what_fails_is_counted_by_name_and_never_averaged_in(tmp_path: Path) -> None:
    answers = [Answer(0.02, (0.01,) * 3), *(Answer(0.02, (0.01,) * 3, fault=Fault(kind, 2)) for kind in FaultKind)]
    path = tmp_path / "all.json"
    async with mock_server(Script(tuple(answers))) as server:
        status, out, err = await run(
            *flags(server, num_prompts=10, request_rate=50, timeout_s=2, result_filename=path), "--save-result"
        )
    assert status == 0, err
    result = json.loads(path.read_text())
    assert (result["completed"], result["failed"]) == (2, 8)
    assert result["failures"] == {
        "http error": 2,
        "no answer in time": 2,
        "stream ended without [DONE]": 4,
    }
    assert result["p99_e2el_ms"] < 2000
    assert result["total_output_tokens"] == 8
    assert not result.keys() & DETAILED_KEYS
    assert re.search(r"\| http error +\| +2 \|", out)
    assert re.search(r"^note: .*8 of 10 requests failed", out, re.MULTILINE)


async def test_ctrl_c_ends_it_and_its_requests_at_once() -> None:
    endless = Announcing(Script((Answer(0.01, (1000.0,)),)), 3)
    async with mock_server(endless) as server, asyncio.timeout(TIMEOUT_S):
        async with started(*flags(server)) as process:
            await endless.has_come.wait()
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
        await server.until_idle(TIMEOUT_S)
        assert all(record.left_s is not None for record in server.records)
    assert process.returncode == 130
    assert b"Traceback" not in err
