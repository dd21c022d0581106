from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace

import pytest

from tests.bench.mock_server.__main__ import MockServerSettings, main, schedule_of
from tests.bench.mock_server.schedule import Fault, FaultKind, Steady

PATIENCE_S = 30.0


def test_it_serves_until_it_is_told_to_stop() -> None:
    command = [sys.executable, "-m", "tests.bench.mock_server", "--port=0", "--ttft-ms=0", "--itl-ms=0", "--text=x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("answering at ").strip()
            body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
            request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                assert json.load(answer)["choices"][0]["text"] == "xxx"
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def test_a_setting_that_cannot_be_used_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--jitter", "2"]) == 1
    assert capsys.readouterr().err == "error: --jitter: 2.0 is not from 0 to 1\n"


def test_settings_become_a_schedule() -> None:
    settings = MockServerSettings(ttft_ms=40, itl_ms=8, jitter=0.1, tokens_per_chunk=2, text="x", seed=3)
    assert schedule_of(settings) == Steady(0.04, 0.008, 0.1, 2, "x", None, 1.0, 3)
    broken = replace(settings, fault="http-error", fault_share=0.5, fault_after_chunks=2, fault_status=500)
    assert schedule_of(broken).fault == Fault(FaultKind.HTTP_ERROR, 2, 500)
    assert schedule_of(broken).fault_share == 0.5
