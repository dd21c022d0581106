"""A small fault campaign: real programs, `openai` clients and random bodies; kills, freezes, broken and lossy links, a
full disk and no memory, and damaged and cut files of KV blocks on a disk that stalls."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.campaign.load import WELL
from tests.campaign.results import GAP, UNTRIED
from tests.stations.ring import Station
from tests.stations.stamps import Stamps
from tests.system.harness import forked

TIMEOUT_S = 240.0
KINDS = "kill,freeze,cut,hole,restart,slow,loss,disk-full,memory,kv-flip,kv-cut,kv-stall"


def test_a_small_campaign_finds_nothing(tmp_path: Path) -> None:
    flags = "--faults 9 --minutes 0.08 --seed 2904 --layout 1P2D --transport shm --model qwen3-vl --tiers disk"
    more = f"--clients 6 --requests 8 --step-ms 5 --max-tokens 120 --longest-s 1.5 --stall-s 100 --kinds {KINDS}"
    results, output = tmp_path / "campaigns.jsonl", tmp_path / "output"
    command = ["-m", "tests.campaign", *flags.split(), *more.split()]
    with output.open("wb") as told:
        campaign = forked([*command, f"--folder={tmp_path}", f"--results={results}"], os.environ, told, told)
        try:
            status = campaign.wait(TIMEOUT_S)
        finally:
            campaign.kill()
    said = output.read_text()[-20000:]
    assert status in (0, 1), said
    assert results.exists(), said
    line = json.loads(results.read_text())
    assert line["faults"] == 9
    # how long streams stood, and what comes again in so short a time, depends on what else runs here: campaigns of
    # their own look at that
    assert not any(count for kind, count in line["findings"].items() if kind not in (GAP, UNTRIED)), said
    assert {"kv-flip", "kv-cut", "kv-stall"} <= set(line["kinds"]), said
    assert line["tiers"]["host"]["stored"], said
    assert line["ends"][WELL]
    assert line["random_bodies"]
    assert_the_last_token_of_a_decode_node_was_stamped_everywhere(Stamps(tmp_path, 0.0))


def assert_the_last_token_of_a_decode_node_was_stamped_everywhere(stamps: Stamps) -> None:
    rows = stamps.rows("router")
    last = rows[(rows["station"] == Station.WRITTEN) & (rows["index"] > 0)][-1]  # the first is of the prefill node
    passed = stamps.passed(int(last["request"]), int(last["choice"]), int(last["index"]))
    assert passed is not None
    assert passed.node.startswith("decode-")
    moments_s = (passed.emitted_s, passed.received_s, passed.taken_s, passed.written_s)
    assert list(moments_s) == sorted(moments_s)
    assert stamps.waited_s("router", 0.0, passed.written_s)[2] > 0.0, "its thread has run"
