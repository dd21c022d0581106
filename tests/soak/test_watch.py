"""What is kept of a part: a sample a minute for each program, and what is left when it is over."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from tests.campaign.deployment import Footprint
from tests.campaign.growth import Life
from tests.soak.kept import Part
from tests.soak.watch import left_behind, samples


def life(name: str, *held: tuple[float, int]) -> Life:
    return Life(name, [moment_s for moment_s, _ in held], [Footprint(num, 9, num * 1000) for _, num in held])


def test_each_minute_of_the_longest_life_is_one_sample() -> None:
    long = life("router", (99.0, 40), (101.0, 41), (103.0, 90), (159.0, 41), (161.0, 43))
    taken = samples([life("router", (100.0, 7)), long, life("decode-0", (100.0, 50))], begun_s=100.0)
    assert taken == {
        "router": [[0.0, 41, 9, 41_000], [60.0, 43, 9, 43_000]],
        "decode-0": [[0.0, 50, 9, 50_000]],
    }


def test_processes_segments_and_journals_that_are_left_are_counted(tmp_path: Path) -> None:
    (tmp_path / "journals").mkdir()
    for name in ("journals/cmpl-1.stream", "journals/owner.lock", "router.err"):
        (tmp_path / name).touch()
    mine = [float(os.getpid()), psutil.Process().create_time()]
    killed = Part(1, 1, "", "", processes=[mine, [mine[0], mine[1] - 1000.0]], segments=["baton-nothing"])
    last = Part(2, 2, "", "", processes=[mine])
    assert left_behind([killed, last], tmp_path) == {"processes": 1, "segments": 0, "journals": 1, "other files": 2}
