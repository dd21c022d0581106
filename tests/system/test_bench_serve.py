"""`baton bench serve`, as a person starts it, against a relay of the demo model."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from baton.demo.location import DEMO_MODEL_NAME, checkpoint_path
from tests.system.conftest import running
from tests.system.harness import ROOT, Relay, start_relay

NUM_PROMPTS = 8
TIMEOUT_S = 120.0


def test_the_endpoint_is_measured_and_taken_apart(tmp_path: Path, relays: list[Relay]) -> None:
    path = tmp_path / "result.json"
    served = start_relay(checkpoint_path(), tmp_path, router=("--served-model-name", DEMO_MODEL_NAME))
    with contextmanager(running)(served, relays) as relay:
        command = [
            *(sys.executable, "-m", "baton", "bench", "serve", f"--base-url={relay.router.address}"),
            *("--ready-check-timeout-sec=60", "--request-rate=20", f"--num-prompts={NUM_PROMPTS}", "--ignore-eos"),
            *("--random-input-len=64", "--random-output-len=8", "--save-result", f"--result-filename={path}"),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert (result["completed"], result["failed"], result["model_id"]) == (NUM_PROMPTS, 0, DEMO_MODEL_NAME)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (64 * NUM_PROMPTS, 8 * NUM_PROMPTS)
    assert result["breakdown"]["ttst"]["parts"]["exposed_transfer"]["mean_ms"] > 0
    assert result["cached_tokens"] == 0
    for name in ("ttft", "ttst"):
        assert result["breakdown"][name]["largest_error"] < 0.02
    assert "Where the time goes" in done.stdout
