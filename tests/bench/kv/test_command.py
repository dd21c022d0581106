from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from bench.kv import measure
from bench.kv.command import main
from bench.kv.measure import NodePair
from bench.kv.node_process import pattern, wrong_blocks
from wire.errors import InvalidSetting, RequestFailed, TransferFailed


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_a_quick_run_measures_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = children()
    path = tmp_path / "kv.json"
    assert main(["--quick", "--transports", "shm", "--checksum", "xxh3", "--json", str(path)]) == 0
    assert children() == before
    found = json.loads(path.read_text())
    cases = found["cases"]
    assert [(case["transport"], case["num_blocks"]) for case in cases] == [("shm", 1), ("shm", 4)]
    assert all(len(case["wall_s"]) == len(case["memcpy_s"]) == 2 for case in cases)
    assert all(
        0 < wall < let_go for case in cases for wall, let_go in zip(case["wall_s"], case["let_go_s"], strict=True)
    )
    assert "\nshm " in capsys.readouterr().out


def test_blocks_that_were_not_delivered_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with NodePair("shm", "none", 4, 4096) as pair:
        pair.hand_over_verified(0, 4)
        monkeypatch.setattr(pair, "hand_over", lambda first, count: (0.0, 0.0))
        with pytest.raises(TransferFailed, match="4 of 4 blocks were delivered with other bytes"):
            pair.hand_over_verified(0, 4)


def test_a_transport_that_fails_is_reported_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class OnlyZmq(NodePair):
        def hand_over(self, first: int, count: int) -> tuple[float, float]:
            if self.transport == "shm":
                raise RequestFailed("it broke")
            return super().hand_over(first, count)

    monkeypatch.setattr(measure, "NodePair", OnlyZmq)
    assert main(["--quick", "--transports", "shm,zmq", "--checksum", "none", "--blocks", "1"]) == 1
    shown = capsys.readouterr().out
    assert "shm, none failed: it broke" in shown
    assert "\nzmq " in shown


def test_a_folder_that_is_missing_is_noticed_before_measuring() -> None:
    with pytest.raises(InvalidSetting, match="there is no such folder"):
        main(["--quick", "--json", "/nowhere/kv.json"])


def test_a_single_wrong_byte_and_a_swapped_block_are_found() -> None:
    blocks = np.stack([pattern(block_id, 256) for block_id in range(6)])
    assert wrong_blocks(blocks, 0, 6) == []
    blocks[1, 17] ^= 1
    blocks[[3, 4]] = blocks[[4, 3]]
    assert wrong_blocks(blocks, 0, 6) == [1, 3, 4]
    assert wrong_blocks(blocks, 2, 2) == [3]
