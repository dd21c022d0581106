from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from baton.bench.child import Child
from baton.bench.documents import load_result
from baton.bench.kv import measure
from baton.bench.kv.command import main
from baton.bench.kv.measure import KvDocument, NodePair
from baton.bench.kv.node_process import pattern, wrong_blocks
from baton.wire.errors import InvalidSetting, RequestFailed, TransferFailed

TINY = ("--block-bytes=65536", "--rounds=2", "--min-pool-bytes=1048576")


class FakeNode:
    """Either end of a pair: stamps, and blocks that did not arrive."""

    def ask(self, command: str, **_: Any) -> Any:
        answers = {"finish": {"computed_s": 1.0, "let_go_s": 1.5}, "delivered": 1.25, "wrong_blocks": [2, 3]}
        return answers.get(command)


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_a_quick_run_measures_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = children()
    path = tmp_path / "kv.json"
    assert main([*TINY, "--blocks=1,4", "--transports=shm", "--checksum=xxh3", f"--json={path}"]) == 0
    assert children() == before
    found = json.loads(path.read_text())
    cases = found["cases"]
    assert [(case["transport"], case["num_blocks"]) for case in cases] == [("shm", 1), ("shm", 4)]
    assert all(len(case["wall_s"]) == len(case["memcpy_s"]) == 20 for case in cases)
    assert all(
        0 < wall < let_go for case in cases for wall, let_go in zip(case["wall_s"], case["let_go_s"], strict=True)
    )
    shown = capsys.readouterr().out
    assert "\n| shm " in shown
    assert isinstance(load_result(path).document, KvDocument)


def test_blocks_that_were_not_delivered_are_an_error() -> None:
    pair = NodePair(cast("Child", FakeNode()), cast("Child", FakeNode()))
    assert pair.hand_over(0, 4) == (0.25, 0.5)
    with pytest.raises(TransferFailed, match="2 of 4 blocks were delivered with other bytes"):
        pair.hand_over_verified(0, 4)


def test_a_transport_that_fails_is_reported_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def pair(transport: str, *_: object) -> Iterator[NodePair]:
        if transport == "shm":
            raise RequestFailed("it broke")
        yield NodePair(cast("Child", FakeNode()), cast("Child", FakeNode()))

    monkeypatch.setattr(measure, "node_pair", pair)
    monkeypatch.setattr(NodePair, "hand_over_verified", lambda *_: None)
    monkeypatch.setattr(NodePair, "copy", lambda *_: 0.1)
    assert main([*TINY, "--transports=shm,zmq", "--checksum=none", "--blocks=1"]) == 1
    shown = capsys.readouterr().out
    assert "shm, none failed: it broke" in shown
    assert "\n| zmq " in shown


def test_a_single_wrong_byte_and_a_swapped_block_are_found() -> None:
    blocks = np.stack([pattern(block_id, 256) for block_id in range(6)])
    assert wrong_blocks(blocks, 0, 6) == []
    blocks[1, 17] ^= 1
    blocks[[3, 4]] = blocks[[4, 3]]
    assert wrong_blocks(blocks, 0, 6) == [1, 3, 4]
    assert wrong_blocks(blocks, 2, 2) == [3]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--transports=smoke", "--transports 'smoke' is not one of shm, zmq, nixl"),
        ("--checksum=,", "--checksum names nothing"),
        ("--block-bytes=100", "--block-bytes 100 is not a multiple of 64"),
    ],
)
def test_what_cannot_be_measured_is_named(flag: str, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        main([flag])
