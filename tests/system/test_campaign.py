"""A small fault campaign: real programs, kills, freezes, broken and lossy links, a full disk and no memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.system.harness import ROOT

TIMEOUT_S = 240.0
KINDS = "kill,freeze,cut,hole,restart,slow,loss,disk-full,memory"


def test_a_small_campaign_finds_nothing(tmp_path: Path) -> None:
    flags = "--faults 9 --minutes 0.08 --seed 834 --layout 1P2D --transport shm --clients 6 --requests 6"
    more = f"--step-ms 5 --max-tokens 120 --longest-s 1.5 --stall-s 100 --kinds {KINDS} --folder {tmp_path}"
    command = [sys.executable, "-m", "tests.campaign", *flags.split(), *more.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    assert "9 faults" in done.stdout
    assert "0 ended with an error or a broken connection" in done.stdout
